"""Draws random texts under a constraint, makes random JSON schemas, and checks texts against them.

The tokens are those of the bundled model; no model is needed, since any logits will do."""

import json
import random
from decimal import Decimal, InvalidOperation
from functools import cache

import jsonschema
import torch
from gguf.vocab import bytes_to_unicode
from paths import ROOT
from tokenizers import Tokenizer

from hotsplit.errors import HotsplitError
from hotsplit.runtime.text.codec import TextCodec

SIGN, CLOSING, QUOTE, END = 8.0, 10.0, 30.0, 60.0  # added to logits once a text is long

JSON_GBNF = r"""
# any JSON object
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( pair ("," ws pair)* )? "}" ws
pair   ::= string ":" ws value
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= "-"? ("0" | [1-9] [0-9]{0,15}) ("." [0-9]+)? ([eE] [-+]? [0-9]{1,3})? ws
ws     ::= | " " | "\n" [ \t]{0,20}
"""
ARITHMETIC_GBNF = r"""
root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t]*
"""
LIST_GBNF = 'root ::= item+\n# one a line\nitem ::= "- " [^\\r\\n\\u2028\\U00002029]+ "\\n"\n'
CHESS_GBNF = r"""
root ::= (
    # the first pair of moves
    "1. " move " " move "\n"
    ([1-9] [0-9]? ". " move " " move "\n")+
)
move    ::= (pawn | nonpawn | castle) [+#]?
nonpawn ::= [NBKQR] [a-h]? [1-8]? "x"? [a-h] [1-8]
pawn    ::= ([a-h] "x")? [a-h] [1-8] ("=" [NBKQR])?
castle  ::= "O-O" "-O"?
"""


@cache
def tiny_codec() -> TextCodec:
    """The bundled model's codec: 4,096 tokens of bytes, of which token 0 ends a text."""
    path = ROOT / "examples" / "tiny-relu" / "tokenizer.json"
    return TextCodec(Tokenizer.from_file(str(path)), 0, frozenset({0}))


@cache
def token_bytes() -> dict[int, bytes]:
    """The bytes of each token of the bundled model, by GPT-2's table of bytes; not the end
    token."""
    table = {sign: byte for byte, sign in bytes_to_unicode().items()}
    vocab = tiny_codec().tokenizer.get_vocab()
    return {i: bytes(table[sign] for sign in token) for token, i in vocab.items() if i}


@cache
def favoured(codec):
    vocab = codec.tokenizer.get_vocab()
    favour = torch.zeros(max(vocab.values()) + 1)
    for token, i in vocab.items():
        favour[i] = {'"': QUOTE, "}": CLOSING, "]": CLOSING, "Ċ": QUOTE}.get(
            token, SIGN * (len(token) == 1)
        )
    favour[list(codec.end_ids)] = END
    return favour


def masked(constraint, logits_V):
    return logits_V.masked_fill(~constraint.mask_V(len(logits_V)), -torch.inf)


def is_finished(constraint) -> bool:
    """True if only an end token may follow."""
    mask_V = constraint.mask_V(constraint._num_tokens)
    mask_V[constraint._end_ids] = False
    return constraint.can_end and not mask_V.any()


def write(constraint, codec, logits_of, seed, patience=40, most=1500):
    """Draws up to `most` tokens at temperature 1.5 under the constraint's mask; returns (token ids,
    whether the end token came).

    After `patience` tokens, short tokens, closing ones and the end are favoured."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = []
    favour = favoured(codec)
    while len(ids) < most:
        logits_V = logits_of(ids, generator).clone()
        if len(ids) >= patience:
            logits_V[: len(favour)] += favour
        probability_V = torch.softmax(masked(constraint, logits_V) / 1.5, dim=0)
        token_id = int(torch.multinomial(probability_V, 1, generator=generator))
        constraint.accept(token_id)
        if token_id in codec.end_ids:
            return ids, True
        ids.append(token_id)
    return ids, False


def no_model(ids, generator):
    return torch.randn(tiny_codec().tokenizer.get_vocab_size(), generator=generator)


def written(constraint, seed=0):
    ids, has_ended = write(constraint.fork(), tiny_codec(), no_model, seed)
    assert has_ended, tiny_codec().tokenizer.decode(ids)
    return b"".join(token_bytes()[i] for i in ids).decode()


def takes(constraint, text):
    """True if the constraint accepts the whole text in some division into tokens."""
    return takes_bytes(constraint, text.encode())


def takes_bytes(constraint, text):
    if not text:
        return constraint.can_end
    for token_id in constraint.mask_V(4096).nonzero().flatten().tolist():
        if token_id and text.startswith(token_bytes()[token_id]):
            fork = constraint.fork()
            fork.accept(token_id)
            if takes_bytes(fork, text[len(token_bytes()[token_id]) :]):
                return True
    return False


def follows(constraint, text):
    """True if the constraint accepts the whole text as the tokenizer divides it."""
    constraint = constraint.fork()
    try:
        for token_id in tiny_codec().tokenizer.encode(text, add_special_tokens=False).ids:
            constraint.accept(token_id)
        return constraint.can_end
    except HotsplitError as error:
        assert "does not allow token" in str(error)
        return False


# -- random schemas ---------------------------------------------------------------------------


def random_schema(rng: random.Random, depth: int = 0) -> dict:
    kinds = ["integer", "number", "string", "text", "enum", "boolean", "format"]
    kinds += ["object", "array", "anyOf", "ref", "prefix", "allOf"] * (depth < 3)
    kind = rng.choice(kinds)
    if kind == "boolean":
        return {"type": ["boolean", "null"]}
    if kind == "format":
        formats = ["date", "uuid", "ipv4", "ipv6", "email"]
        return {"type": "string", "format": rng.choice(formats)}
    if kind == "anyOf":
        return {"anyOf": [random_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]}
    if kind == "ref":
        return {"$ref": f"#/$defs/{rng.choice('abc')}"}
    if kind == "prefix":
        first = [random_schema(rng, depth + 1) for _ in range(rng.randint(1, 2))]
        rest = rng.choice([False, random_schema(rng, depth + 1)])
        return {"type": "array", "prefixItems": first, "items": rest}
    if kind == "allOf":
        return {"allOf": [random_object(rng, depth + 1), random_object(rng, depth + 1)]}
    others = {"integer": random_integer, "number": random_number, "string": random_string}
    others |= {"text": random_pattern, "enum": random_enum}
    return (others | {"object": random_object, "array": random_array})[kind](rng, depth)


def random_integer(rng, depth):
    low = rng.randint(-2000, 2000)
    schema = {"type": "integer"}
    if rng.random() < 0.7:
        schema[rng.choice(["minimum", "exclusiveMinimum"])] = low
    if rng.random() < 0.7:
        schema[rng.choice(["maximum", "exclusiveMaximum"])] = low + rng.randint(2, 3000)
    if rng.random() < 0.3:
        schema["multipleOf"] = rng.randint(2, 9)
    return schema


def random_number(rng, depth):
    low = rng.randint(-5000, 5000) / rng.choice([1, 2, 64, 128])
    schema = {"type": "number"}
    if rng.random() < 0.7:
        schema[rng.choice(["minimum", "exclusiveMinimum"])] = low
    if rng.random() < 0.7:
        schema[rng.choice(["maximum", "exclusiveMaximum"])] = low + rng.randint(1, 500) / 4
    return schema


def random_string(rng, depth):
    least = rng.randint(0, 6)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 30)}


def random_pattern(rng, depth):
    patterns = ["^[a-z]{2,8}$", "^(red|green|blue)$", "[0-9]", "^a|b$", r"^\d{3}-\d{4}$", "^[^a]*$"]
    patterns += ["x.y", r"^\w+@\w+\.(com|org)$", "^(ab?)+c$", "(^a|b)c", "^.{3}$", r"\\", '"']
    pattern = rng.choice(patterns)
    return {"type": "string", "pattern": pattern, "maxLength": 16}


def random_enum(rng, depth):
    values = ["red", 'a "quoted" one', "é😀", "", 3, -7, 1.5, None, True, [1, "x"], {"a": [None]}]
    if rng.random() < 0.2:
        return {"const": rng.choice(values)}
    return {"enum": rng.sample(values, rng.randint(1, 4))}


def random_object(rng, depth):
    names = rng.sample(["id", "name", "a b", 'quote"', "é", "tags", "a/b~c", "", "id2"], 4)
    names = names[: rng.randint(0, 4)]
    schema = {
        "type": "object",
        "properties": {name: random_schema(rng, depth + 1) for name in names},
        "required": [name for name in names if rng.random() < 0.5],
    }
    kind = rng.random()
    if kind < 0.4:
        schema["additionalProperties"] = False
    elif kind < 0.6:
        schema["additionalProperties"] = random_schema(rng, depth + 1)
    elif kind < 0.7:
        schema["patternProperties"] = {"^p[0-9]$": random_schema(rng, depth + 1)}
    if rng.random() < 0.15:
        schema[rng.choice(["minProperties", "maxProperties"])] = rng.randint(0, 4)
    return schema


def random_array(rng, depth):
    schema = {"type": "array", "items": random_schema(rng, depth + 1)}
    if rng.random() < 0.6:
        schema["minItems"] = rng.randint(0, 3)
        schema["maxItems"] = schema["minItems"] + rng.randint(0, 3)
    return schema


def schema_number(seed: int) -> dict:
    rng = random.Random(seed)
    after = {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/a"}]}
    inner = {"value": random_schema(rng, 2), "next": after}
    node = {"type": "object", "properties": inner, "required": ["value"]}
    node["additionalProperties"] = False
    rest = {"b": random_integer(rng, 3), "c": random_string(rng, 3)}
    return random_schema(rng) | {"$defs": {"a": node} | rest}


def exact(number):
    try:
        return Decimal(number)
    except InvalidOperation:  # an exponent of over 18 digits
        return float(number)


def check(schema, text):
    """Raises unless the text is JSON that satisfies the schema; compares numbers exactly, not as
    floats."""
    jsonschema.Draft202012Validator.check_schema(schema)
    document = json.loads(text, parse_float=exact)
    jsonschema.Draft202012Validator(schema).validate(document)
