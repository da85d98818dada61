"""Options of `hotsplit run`: what is refused before anything is made, and what is accepted."""

import pytest

from hotsplit.cli import main
from hotsplit.run.housekeeping import list_cache

pytest_plugins = ("run_fixtures",)


@pytest.mark.parametrize(
    "words, message",
    [
        ("-p the -n 0", "max_tokens (-n) is 0, wanted 1 or more, or -1 for no limit"),
        ("-p the --mode predicted", "nothing to predict"),
        ("-p the -c 1000", "the model has up to 128"),
        ("-p the -c 1000 --kv-offload", "the model has up to 128"),
        ("-p the --kv-offload top=5", "multiple of the block"),
        ("-p the --kv-offload positions=capped", "wanted on or NAME=VALUE"),
        ("-p the -ctk q8_0", "multiple of 32"),
        ("-p the --logprobs 3", "--logprobs goes with --json or --json-lines"),
        (
            "-p the --logprobs 3000 --json",
            "num_logprobs is 3000, wanted a whole number from 0 to 1000",
        ),
        ("--logprobs 3", "--logprobs is for a text: give -p TEXT"),
        ("-p the --device gpu", "device 'gpu'; wanted cpu or cuda"),
        ("-p the --corpus none.txt", "none.txt: no such file or folder"),
        ("-p the --system x", "--system, --system-file and --chat-template are for --chat"),
        ("-p the --system-file x", "--system-file and --chat-template are for --chat"),
        ("-p the --chat --system-file none.txt", "none.txt: no such file; wanted a system message"),
        ("-p the --chat --chat-template-kwargs [", "--chat-template-kwargs: not JSON"),
        ("-p the --chat --chat-template none", "none: neither a file nor the name of a chat"),
        ("-p the --json-schema {", "the JSON schema is not JSON"),
        ("-p the --regex (", "regex"),
        ("-p the --top-p 7", "top_p is 7.0, wanted a number from 0 to 1"),
        ("-p the --rope-scaling yarn", "--rope-scaling yarn needs a factor, --rope-scale"),
        ("-p the --rope-scale 0.5", "rope scale 0.5, wanted 1 to 10,000"),
        ("-p the -md none.gguf", "none.gguf: no such file or folder"),
        ("--json", "--json and --json-lines are for a text"),
        ("", "has no chat template"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_made(capsys, silu, cache, words, message):
    code = main(["run", str(silu), *words.split()])
    shown = capsys.readouterr()
    assert code in (1, 2) and shown.out == ""
    assert message in shown.err.splitlines()[-1]
    assert list_cache(cache) == () and "stage 1" not in shown.err


def test_an_empty_prompt_and_a_missing_source_are_refused(capsys, silu, cache):
    for source, prompt, message in (
        (silu, "", "the prompt is empty"),
        (silu / "none", "the", "no such folder"),
    ):
        assert main(["run", str(source), "-p", prompt]) == 1
        assert message in capsys.readouterr().err.splitlines()[-1]
    assert list_cache(cache) == ()


@pytest.mark.parametrize("words", ["", "--mode predicted"])
def test_too_few_tokens_are_refused_before_anything_is_made(capsys, relu, cache, words):
    code = main(["run", str(relu), "-p", "the", "--tokens", "1279", *words.split()])
    line = capsys.readouterr().err.splitlines()[-1]
    assert code == 1 and list_cache(cache) == ()
    assert "--tokens 1279: too few to train predictors, wanted 1,280 or more" in line


def test_a_dense_model_needs_no_tokens_to_train_on(capsys, silu):
    code = main(["run", str(silu), "-p", "the", "-n", "1", "--tokens", "3", "--no-verify"])
    assert code == 0, capsys.readouterr().err


def test_a_count_of_threads_is_remarked_on_once(capsys, silu):
    from hotsplit.runtime.kernels.threads import _note_too_many

    _note_too_many.cache_clear()
    assert main(["run", str(silu), "-p", "the", "-n", "1", "-t", "999", "--no-verify"]) == 0
    assert capsys.readouterr().err.count("note: 999 threads") == 1
    assert main(["run", str(silu), "-p", "the", "-n", "1", "-t", "1"]) == 0


TEMPLATE = "{{ messages[0].content }}{% if shout %}!!{% endif %} {{ messages[-1].content }}"


def test_an_answer_takes_the_variables_and_the_file_of_a_system_message(
    capsys, silu, tmp_path, monkeypatch
):
    """The text that is tokenised contains what the template rendered."""
    from hotsplit.runtime.text.codec import TextCodec

    template, system = tmp_path / "template.jinja", tmp_path / "system.txt"
    template.write_text(TEMPLATE)
    system.write_text("be brief\n")
    read, was = [], TextCodec.encode_rendered

    def encode(self, text, *more, **options):
        read.append(text)
        return was(self, text, *more, **options)

    monkeypatch.setattr(TextCodec, "encode_rendered", encode)
    words = [
        "-p",
        "hi",
        "--chat",
        "-n",
        "1",
        "--no-verify",
        "-sysf",
        system,
        "--chat-template",
        template,
        "--chat-template-kwargs",
        '{"shout": true}',
    ]
    assert main(["run", *map(str, [silu, *words])]) == 0, capsys.readouterr().err
    assert any("be brief!! hi" in text for text in read)
