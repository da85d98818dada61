"""Texts of tokens that end a text or a turn, whatever a file says that they are."""

# llama.cpp's special_eog_ids (llama-vocab.cpp, 2026).
_END_TEXTS = """
    <|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn>
    <|endoftext|> </s> <|eom_id|> <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance>
    <eos> <turn|> <|tool_response> [e~[ <\uff5cend\u2581of\u2581sentence\uff5c>
"""
END_TEXTS = tuple(_END_TEXTS.split())
# Tokens around the files of a repository, behind which a completion of code ends; a file may name
# one of each kind, and otherwise they are known by their texts.
CODE_TEXTS = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
CONTROL_TEXTS = frozenset(END_TEXTS).union(*CODE_TEXTS.values())
