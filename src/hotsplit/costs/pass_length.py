"""How many tokens a forward pass takes."""

# Maximum tokens per forward pass. Weights are unpacked once per pass, and longer matrix products
# are faster: 512 tokens of 1.1 B parameters took 20 s in passes of 128, 15 in passes of 256 and 13
# in one (docs/log/prefill.md). Passes are short if both parts of a plan are on the CPU, and while
# observed, when each pass is a batch of predictor training.
PREFILL_CHUNK = 512
SHORT_CHUNK = 128
# Tokens of a text that wait for their keys and values in a draft block, which they get when drafts
# are wanted, or together.
MOST_WAITING = 128
# Tokens before those whose hidden states a draft block keeps, to make their keys again: as many as
# a check can reject, and the end of a turn.
PAST_STATES = 64
LOGITS_CHUNK = 16  # tokens whose logits are computed at a time
