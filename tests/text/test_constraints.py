"""Constrained texts: documents against jsonschema, masks against other matchers."""

import datetime
import ipaddress
import json
import random
import uuid

import jsonschema
import pytest
import regex as regexes
import torch
from case_tables import rows_of
from constrained_texts import (
    check,
    follows,
    is_finished,
    masked,
    schema_number,
    takes,
    tiny_codec,
    token_bytes,
    written,
)
from tokenizers import Tokenizer, decoders, models, normalizers

from hotsplit.errors import HotsplitError
from hotsplit.runtime.generate import constraints
from hotsplit.runtime.generate.constraints import json_schema_constraint, regex_constraint
from hotsplit.runtime.text.codec import TextCodec
from hotsplit.tokens.ggml_tokenizer import BYTE_TOKENS


def documents_of(seeds):
    """(number of documents, messages of refusals); every document is checked."""
    num_documents, refusals = 0, []
    for seed in seeds:
        schema = schema_number(seed)
        try:
            constraint = json_schema_constraint(schema, tiny_codec())
        except HotsplitError as error:
            refusals.append(str(error))
            continue
        check(schema, written(constraint, seed))
        num_documents += 1
    return num_documents, refusals


def test_documents_of_random_schemas_are_valid():
    num_documents, refusals = documents_of(range(30))
    assert num_documents >= 22 and all("\n" not in message for message in refusals), refusals


def test_the_check_of_documents_rejects_wrong_ones():
    schema = {"type": "object", "properties": {"a": {"maximum": 9}}, "required": ["a"]}
    check(schema, '{"a": 9.0}')
    for wrong in ("{}", '{"a": 9.00000000000000000001}', '{"a": 9', "[]"):
        with pytest.raises((ValueError, jsonschema.ValidationError)):
            check(schema, wrong)


REGEXES = [
    "import (os|sys)",
    "(cat|car)s?",
    "[a-c]{2,4}x*",
    r"-?[0-9]+(\.[0-9]+)?",
    "(ab|a)(bc|c)",
    'q"[^"]*"',
    "(?:é)+|è",
]


@pytest.mark.parametrize("pattern", REGEXES)
def test_masks_of_a_regex_equal_partial_matching(pattern):
    """Checks each token of the vocabulary, at up to 12 places of a text, against the package
    regex."""
    constraint, tokens = regex_constraint(pattern, tiny_codec()), token_bytes()
    oracle = regexes.compile(pattern.encode())  # matches bytes: classes name only ASCII
    rng, text = random.Random(0), b""
    for _ in range(12):
        want = {
            i
            for i, found in tokens.items()
            if oracle.fullmatch(text + found, partial=True) and is_start_of_utf8(text + found)
        }
        is_whole = oracle.fullmatch(text) is not None
        mask = constraint.mask_V(4100)
        assert set(mask.nonzero().flatten().tolist()) == want | ({0} if is_whole else set()), text
        assert constraint.can_end == is_whole and is_finished(constraint) == (not want)
        if not want:
            break
        token_id = rng.choice(sorted(want))
        constraint.accept(token_id)
        text += tokens[token_id]


def is_start_of_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data"
    return True


def test_tokens_that_reach_beyond_the_end_are_not_allowed():
    codec = tiny_codec()
    constraint = regex_constraint("d", codec)
    vocab = codec.tokenizer.get_vocab()
    assert {"d", "de", "def"} <= vocab.keys()
    allowed = constraint.mask_V(4096).nonzero().flatten().tolist()
    assert allowed == [vocab["d"]]
    with pytest.raises(HotsplitError, match=f"^the regex does not allow token {vocab['de']} "):
        constraint.accept(vocab["de"])
    constraint.accept(vocab["d"])  # a refused token leaves it where it was
    assert is_finished(constraint) and constraint.mask_V(4096).nonzero().tolist() == [[0]]


def test_end_tokens_are_allowed_where_the_grammar_may_end_and_padding_never_is():
    tokenizer = tiny_codec().tokenizer
    codec = TextCodec(tokenizer, 0, frozenset({0, 7, 5000}))  # 5000 is beyond the tokenizer
    constraint = regex_constraint("ab*", codec)
    a, b = tokenizer.token_to_id("a"), tokenizer.token_to_id("b")
    assert not constraint.mask_V(4224)[[0, 7]].any() and not constraint.can_end
    constraint.accept(a)
    mask = constraint.mask_V(4224)
    assert mask[[0, 7, b]].all() and not mask[4096:].any() and not is_finished(constraint)
    here = constraint.fork()
    constraint.accept(7)
    assert is_finished(constraint) and constraint.can_end
    here.accept(b)  # the fork goes on
    assert here.can_end and not is_finished(here)
    for wrong in (-1, 4096, 5000, 10**6, tokenizer.token_to_id("c")):
        with pytest.raises(HotsplitError, match=f"does not allow token {wrong} "):
            here.accept(wrong)


def test_a_model_without_a_row_for_the_only_token_is_refused():
    a = tiny_codec().tokenizer.token_to_id("a")
    with pytest.raises(HotsplitError, match="^the regex allows no token from here on"):
        regex_constraint("a", tiny_codec()).mask_V(a)


def test_a_tokenizer_is_read_once(monkeypatch):
    made = []
    real = constraints.GrammarProcess
    monkeypatch.setattr(constraints, "GrammarProcess", lambda *a: made.append(1) or real(*a))
    tokenizer = Tokenizer.from_str(tiny_codec().tokenizer.to_str())  # not seen before
    for end_ids in ({0}, {0, 4095}):  # a chat's codec has more ends, and does not last
        regex_constraint("a", TextCodec(tokenizer, 0, frozenset(end_ids)))
    assert len(made) == 1


# A name | a schema of alternatives that exclude each other, with Cat and Dog as definitions.
UNIONS = r"""
pydantic | {"type": "object", "required": ["pet"], "properties": {"pet": {"discriminator":
  {"propertyName": "kind", "mapping": {"cat": "#/$defs/Cat", "dog": "#/$defs/Dog"}},
  "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}]}}}
no discriminator | {"oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}]}
defaults | {"discriminator": {"propertyName": "kind"},
  "oneOf": [{"$ref": "#/$defs/Bird"}, {"$ref": "#/$defs/Fish"}]}
types | {"oneOf": [{"$ref": "#/$defs/S"}, {"type": ["null", "boolean"]}, {"enum": [7]}]}
enums | {"oneOf": [{"enum": ["a", "b"]}, {"enum": ["c", null]}]}
annotations | {"type": "boolean", "example": true, "xml": {"name": "x"},
  "externalDocs": {"url": "http://localhost"}}
"""


def tagged(kind, *required, **properties):
    own = {"const": kind, "default": kind, "type": "string"}
    required = [*required, *properties]
    return {"type": "object", "required": required, "properties": {"kind": own, **properties}}


DEFINED = {
    "Cat": tagged("cat", "kind", meows={"type": "integer"}),
    "Dog": tagged("dog", "kind", barks={"type": "boolean"}),
    "Bird": tagged("bird"),
    "Fish": tagged("fish"),
    "S": {"type": "string", "maxLength": 3},
}


@pytest.mark.parametrize(("name", "union"), rows_of(UNIONS, " | "))
def test_unions_whose_alternatives_exclude_each_other(name, union):
    schema = {"$defs": DEFINED, **json.loads(union)}
    constraint = json_schema_constraint(schema, tiny_codec())
    documents = {written(constraint, seed) for seed in range(8)}
    for document in documents:
        jsonschema.validate(json.loads(document), schema)
    assert len(documents) > 1


# A name, a schema, a valid document and an invalid one; what is not an assertion of JSON Schema
# changes nothing.
ANNOTATED = r"""
format of a number | {"type": "integer", "format": "int32"} | 5 | "5"
format without type | {"format": "double"} | 1.5 | x
unknown formats | {"type": "object", "properties": {"a": {"type": "string", "format":
  "password"}, "b": {"type": "string", "format": "path", "maxLength": 1}}} | {"a":"x","b":"."}
  | {"b":".."}
nullable | {"type": "string", "nullable": true} | "a" | null
extensions | {"type": "boolean", "x-order": 3, "x-guidance": {"lenient": 5}} | true | null
editors | {"enum": ["a", "b"], "enumNames": ["A", "B"], "markdownDescription": "*a*",
  "enumDescriptions": 3, "defaultSnippets": []} | "b" | "c"
strict | {"type": "null", "strict": true, "name": "answer"} | null | 1
id | {"id": "https://example.org/a", "properties": {"a": {"id": 5, "type": "null"}}} |
  {"a":null} | {"a":1}
$id | {"$id": "https://example.org/a", "$defs": {"a": {"type": "null"}}, "items": {"$ref":
  "#/$defs/a"}, "type": "array"} | [null] | [1]
$schema | {"$schema": "https://json-schema.org/draft-07/schema", "type": "null"} | null | 1
misspelt | {"type": "string", "maxlength": 1, "maxLength": 2} | "ab" | "abc"
annotations | {"type": "null", "deprecated": true, "contentSchema": {}, "$vocabulary": {}} |
  null | 1
as a property | {"type": "object", "properties": {"nullable": {"type": "null"}, "format":
  {"const": "x"}}, "required": ["nullable"]} | {"nullable":null,"format":"x"} | {"format":"x"}
uniqueItems | {"type": "array", "uniqueItems": false, "items": {"const": 1}} | [1,1] | [2]
nullable references | {"$defs": {"A": {"type": "object", "required": [], "properties": {"next":
  {"$ref": "#/$defs/A", "nullable": true, "x-a": 1}}}}, "$ref": "#/$defs/A"} |
  {"next":{"next":{}}} | {"next":null}
recursive union | {"$defs": {"List": {"type": "object", "required": ["head"], "properties":
  {"kind": {"const": "list"}, "head": {"discriminator": {"propertyName": "kind"}, "oneOf":
  [{"$ref": "#/$defs/List"}, {"$ref": "#/$defs/Item"}]}}}, "Item": {"type": "object",
  "properties": {"kind": {"const": "item"}}, "required": ["kind"]}}, "$ref": "#/$defs/List"} |
  {"kind":"list","head":{"kind":"list","head":{"kind":"item"}}} |
  {"kind":"list","head":{"kind":"list"}}
bounds of int64 | {"type": "integer", "format": "int64", "minimum": -9223372036854775808,
  "maximum": 9223372036854775807} | -7 | 0.5
bounds of uint64 | {"type": "integer", "exclusiveMinimum": -1, "maximum": 18446744073709551615}
  | 0 | -1
bounds of f64 | {"type": "number", "minimum": -1.7976931348623157e+308, "maximum":
  1.7976931348623157e+308} | -1.5 | "a"
"""


@pytest.mark.parametrize(("name", "schema", "right", "wrong"), rows_of(ANNOTATED, " | "))
def test_annotations_are_ignored(name, schema, right, wrong):
    schema = json.loads(schema)
    constraint = json_schema_constraint(schema, tiny_codec())
    assert follows(constraint, right) and not follows(constraint, wrong)
    check(schema, right)
    with pytest.raises((ValueError, jsonschema.ValidationError)):
        check(schema, wrong)
    check(schema, written(constraint))


FORMATS = {
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "uuid": uuid.UUID,
    # To the grammar, every year has a 29th of February.
    "date": lambda text: datetime.date.fromisoformat(text.replace("-02-29", "-02-28")),
    "time": r"([01]\d|2[0-3]):[0-5]\d:([0-5]\d|60)(\.\d+)?([zZ]|[+-]([01]\d|2[0-3]):[0-5]\d)",
    "date-time": r"\d{4}-[01]\d-[0-3]\d[tT][0-2]\d:[0-5]\d:[0-6]\d(\.\d+)?([zZ]|[+-]\d\d:\d\d)",
    "duration": r"P(?=.)(\d+W|(\d+Y)?(\d+M)?(\d+D)?(T(?=.)(\d+H)?(\d+M)?(\d+S)?)?)",
    "email": r"[^@ ]+@[^@ ]+|\".*\"@[^@ ]+",
    "hostname": r"[a-zA-Z0-9]([a-zA-Z0-9.-]*[a-zA-Z0-9])?",
    "uri": r"[a-zA-Z][a-zA-Z0-9+.-]*:[!-~]*",
}


@pytest.mark.parametrize("name", FORMATS)
def test_formats_are_enforced(name):
    is_one = FORMATS[name]
    constraint = json_schema_constraint({"type": "string", "format": name}, tiny_codec())
    for seed in range(12):
        text = json.loads(written(constraint, seed))
        if isinstance(is_one, str):
            assert regexes.fullmatch(is_one, text), text
        else:
            is_one(text if name != "date" or text[:4] != "0000" else f"0001{text[4:]}")


A = {"type": "object", "properties": {"a": {"type": "null"}}}
B = {"type": "object", "properties": {"b": {"type": "null"}}}
# (schema, a valid document, one with a property that the schema does not name, whether it may)
CLOSED = {
    "properties": (A, '{"a":null}', '{"a":null,"c":1}', False),
    "open": (A | {"additionalProperties": True}, '{"a":null}', '{"a":null,"c":1}', True),
    "by a reference": (
        {"$defs": {"A": A}, "type": "array", "items": {"$ref": "#/$defs/A"}},
        '[{"a":null}]',
        '[{"c":1}]',
        False,
    ),
    "alternatives": ({"anyOf": [A, B]}, '{"b":null}', '{"c":1}', False),
    "none named": ({"type": "object"}, "{}", '{"c":1}', True),
    "more required": (A | {"required": ["c"]}, '{"a":null,"c":1}', '{"c":1,"d":2}', True),
    "more by number": (
        A | {"required": ["a"], "minProperties": 2},
        '{"a":null,"c":1}',
        '{"a":null,"d":2}',
        True,
    ),
    "joined": ({"allOf": [A, B]}, '{"a":null,"b":null}', '{"a":null,"c":1}', True),
    "joined by references": (
        {"$defs": {"A": A, "B": B}, "allOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]},
        '{"a":null,"b":null}',
        '{"a":null,"c":1}',
        True,
    ),
}


@pytest.mark.parametrize("name", CLOSED)
def test_objects_have_the_properties_that_are_named(name):
    schema, plain, more, may = CLOSED[name]
    constraint = json_schema_constraint(schema, tiny_codec())
    assert takes(constraint, plain) and takes(constraint, more) == may
    for text in (plain, more):
        jsonschema.validate(json.loads(text), schema)


def test_keys_that_are_not_named_cannot_pass_for_named_ones():
    """They may neither contain an escape, which JSON readers undo, nor repeat a named key."""
    schema = {
        "type": "object",
        "additionalProperties": True,
        "properties": {"a": {"type": "null"}, "\n": {"type": "null"}},
    }
    constraint = json_schema_constraint(schema, tiny_codec())
    for right in ('{"a":null}', '{"b":1}', '{"a":null,"\\n":null,"b":1}', "{}", '{ "a": null }'):
        assert takes(constraint, right), right
    for wrong in (
        *('{"a":1}', r'{"\u0061":1}', r'{"\u000a":1}', r'{"\n":1}', '{"a":null,"a":1}'),
        *('{"a":null}}', ' {"a":null}', '{"a"  :null}'),
    ):
        assert not takes(constraint, wrong), wrong


def test_tokenizers_that_llguidance_would_misread_are_refused():
    for vocab, message in (
        ({"a": 0, "b": 1, "<end>": 2}, "decoder"),  # nothing says what bytes its tokens are
        ({"a": 0, "b": 40, "<end>": 2}, "there are gaps between its token ids"),
    ):
        codec = TextCodec(Tokenizer(models.BPE(vocab, [])), None, frozenset({2}))
        with pytest.raises(HotsplitError, match=f"tokenizer cannot be constrained: .*{message}"):
            regex_constraint("a", codec)


def test_a_sentencepiece_tokenizer_writes_its_spaces_and_bytes():
    """With byte fallback, the text that the codec's stream makes of the tokens matches the
    regex."""
    keys = ["<unk>", "<s>", "</s>", *BYTE_TOKENS, "▁", "a", "▁a", "b", "ab", "▁b"]
    merges, ids = [("▁", "a"), ("a", "b"), ("▁", "b")], {key: i for i, key in enumerate(keys)}
    options = {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}
    tokenizer = Tokenizer(models.BPE(ids, merges, **options))
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    codec = TextCodec(tokenizer, 1, frozenset({2}))
    for seed in range(10):
        constraint = regex_constraint("( ?(a|b|é|\\n|😀)){1,6}", codec)
        generator, ids = torch.Generator().manual_seed(seed), [keys.index("b")]
        stream, text = codec.stream(ids), ""
        while not is_finished(constraint):
            probability_V = torch.softmax(
                masked(constraint, torch.randn(len(keys) + 5, generator=generator)), dim=0
            )
            token_id = int(torch.multinomial(probability_V, 1, generator=generator))
            constraint.accept(token_id)
            text += "" if token_id == 2 else stream.text(token_id)
        assert regexes.fullmatch("( ?(a|b|é|\n|😀)){1,6}", text), repr(text)
