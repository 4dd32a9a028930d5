"""Text on which tokenizers differ: accents, CJK, emoji, contractions, code, control characters, and more."""

import random
from pydoc_data.topics import topics

HARD = [
    "Caf\u00e9 na\u00efve cafe\u0301 \u00c5ngstr\u00f6m \u0130stanbul \u1e9eTRASSE Stra\u00dfe \u01c5 \ufb01n \u0132",
    "\u4f60\u597d\u4e16\u754c\uff0c\u3053\u3093\u306b\u3061\u306f\u30ab\u30bf\u30ab\u30ca\u3002\ud55c\uad6d\uc5b4",
    "\U00020000\U0002f800 \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea \u2764\ufe0f \u263a\ufe0e \U0001f3fd",
    "don't I'll we've they're he'd she's I'm DON'T I'LL it\u2019s rock'n'roll 'tis ''quoted''",
    "def f(x_1, *a):\n\treturn {'k': x_1 ** 2}  # 0x1F\n\n\nif __name__ == '__main__':\r\n    f(3.14e-10)",
    "\x00 nul \x01\x1f\x7f\x80\x9f \ufeff bom \u200b zero \u00ad soft \u2028 line \u2029 par \ufffd end",
    "a\u00a0b\u2003c\u3000d   e\t\tf \n\n  g\r\n\r\n  h   ",
    "3.14 1,000,000 1\u00bd \u0663\u0664\u0665 \u2167 \u00b2 v1.2.3 2024-01-31T12:00:00Z $9.99 100% #1",
    "\u0645\u0631\u062d\u0628\u0627 \u0628\u0650\u0633\u0652\u0645\u0650 \u05e9\u05c1\u05b8\u05dc\u05d5\u05b9\u05dd",
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u10d2\u10d0 \u0391\u03b8\u03ae\u03bd\u03b1",
    "https://a.b/c?d=e&f=%20#g user@x.org <b>x</b> &amp; \\n \\u00e9 ~!@#$%^&*()_+{}|:\"<>?`-=[];',./",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa AAAA aAbBcC ____ ---- .... ====== \u2014\u2013\u2026\u201cq\u201d\u00abr\u00bb",
    "w" * 99 + " " + "w" * 100 + " " + "w" * 101 + " " + "\u00e9" * 150,
]


def hard_text(pieces: int, seed: int) -> list[str]:
    """The lines above, each on its own, `pieces` mixtures of their parts and of real text, and a long real one."""
    draw = random.Random(seed)
    real = [topics[name] for name in sorted(topics)]
    parts = [text[start : start + 7] for text in HARD for start in range(0, len(text), 5)]
    mixed = ["".join(draw.choices(parts, k=draw.randint(1, 12))) for _ in range(pieces)]
    return [*HARD, *mixed, *real[:24]]
