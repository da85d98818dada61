"""Types of tensors that are refused by name: those of ik_llama.cpp alone, and those that llama.cpp
has removed."""

# ggml.h of ik_llama.cpp. Those from 202 on have rows interleaved.
IK_TYPES = """
133 q6_0       134 iq1_bn     135 iq2_bn     137 iq2_k      138 iq3_k      139 iq4_k
140 iq5_k      141 iq6_k      144 iq4_ks     145 iq2_ks     146 iq4_kss    152 iq5_ks
153 iq2_kt     154 iq3_kt     155 iq4_kt     156 iq3_ks     157 iq2_kl     158 iq1_kt
202 q4_0_r8    206 q5_0_r4    208 q8_0_r8    210 q2_k_r4    211 q3_k_r4    212 q4_k_r4
213 q5_k_r4    214 q6_k_r4    216 iq2_xxs_r4 217 iq2_xs_r4  218 iq3_xxs_r4 219 iq1_s_r4
220 iq4_nl_r4  221 iq3_s_r4   222 iq2_s_r4   223 iq4_xs_r8  229 iq1_m_r4   230 bf16_r16
233 q6_0_r4    335 iq2_bn_r4  337 iq2_k_r4   338 iq3_k_r4   339 iq4_k_r4   340 iq5_k_r4
344 iq4_ks_r4  352 iq5_ks_r4  353 mxfp4_r8   397 q8_k_r16   398 q8_kv_r8   399 q8_k_r8
"""
# Layouts for processors, which llama.cpp makes itself since January 2025.
REMOVED_TYPES = """
31 q4_0_4_4    32 q4_0_4_8    33 q4_0_8_8    36 iq4_nl_4_4  37 iq4_nl_4_8  38 iq4_nl_8_8
"""


def foreign_words(number: int) -> str | None:
    """What a type is, and what to do; None for a type that is none of these."""
    if (name := _names(IK_TYPES).get(number)) is not None:
        return (
            f"{name}, a type of ik_llama.cpp, which alone runs it; get another file of the model,"
            " in types of llama.cpp"
        )
    if (name := _names(REMOVED_TYPES).get(number)) is not None:
        plain = name[:-4]
        return f"{name}, a type that llama.cpp removed; get another file of the model, in {plain}"
    return None


def _names(table: str) -> dict[int, str]:
    words = table.split()
    return dict(zip(map(int, words[::2]), words[1::2], strict=True))
