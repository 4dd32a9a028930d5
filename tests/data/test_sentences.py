"""Sentences by rule. Reference: texts cut by hand; and no character is ever lost or moved."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_parm.data.sentences import SentenceSplitter
from megatron_parm.errors import ConfigError

ENGLISH = [  # a bar where a sentence ends
    "One sentence.|Another one.|A third",
    "Dr. Smith met Mr. and Mrs. J. R. Jones.|They left at 3 p.m. on Jan. 5.",
    "The U.S. Army came.|He lives in the U.S.|The end.",
    "It cost $3.50, i.e. 3.5 dollars, vs. nothing.|Version 1.2.3 is out.",
    "Really?|Yes!|What?!|No...",
    '"Why?" he asked.|She said "No."|He left.',
    "\u201cIt was fine.\u201d|She smiled (a little).|(He did not.)|So it goes.",
    "Wait... there is more.|It ended\u2026|Then it began.",
    "See Fig. 3 and p. 12 of vol. II.|No.|Inc. and Co. differ.",
    "So did I.|Then we left.|He was born in 1990.|In 2000 he left.",
    "1. First item.|2. Second item.",
    "A heading\n\n|A text under it.|It goes\non.",
    "Mail a.b@c.org or see www.x.org/a.b for it.|Thanks!",
    "no capitals here. so every stop counts. is it so? yes".replace(". ", ".|").replace("? ", "?|"),
]
OTHERS = [
    (
        "english",
        "\u4f60\u597d\u3002|\u6211\u53eb\u5c0f\u660e\uff01|\u300c\u5929\u6c23\u597d\u3002\u300d|\u4ed6\u8aaa\u3002",
    ),
    (
        "english",
        "\u300c\u306f\u3044\u3002\u300d\u3068\u8a00\u3063\u305f\u3002|\u6b21\uff1f|\uff13\uff0e\uff15\u3067\u3059\u3002",
    ),
    (
        "english",
        "\u0647\u0644\u061f|\u0646\u0639\u0645.|\u0930\u093e\u092e \u0917\u092f\u093e\u0964|\u0935\u0939",
    ),
    ("german", "Am 3. Oktober kam z. B. Dr. Maier.|Er sagte \u201eNein.\u201c|Dann ging er ca. 2 km."),
    ("french", "M. Dupont dit \u00ab\u00a0Bonjour\u00a0!\u00a0\u00bb|Puis il partit.|Cf. la p. 3."),
    ("spanish", "El Sr. P\u00e9rez vive en EE.UU. con su familia.|\u00bfPor qu\u00e9?|\u00a1No!"),
]


@pytest.mark.parametrize(("lang", "marked"), [("english", text) for text in ENGLISH] + OTHERS)
def test_sentences_end_where_a_reader_ends_them(lang: str, marked: str) -> None:
    wide = any("\u3000" <= character <= "\uffef" for character in marked)
    text = marked.replace("\n\n|", "\n\n").replace("|", "" if wide else " ")
    assert SentenceSplitter(lang).split(text) == [sentence.strip() for sentence in marked.split("|")]


def test_no_character_is_lost_or_moved() -> None:
    @given(
        st.text(st.sampled_from("aB .!?\n\t\"')\u201d\u3002\u300d\u20261\u00e9\u0301"), max_size=40)
        | st.text(max_size=60)
    )
    def check(text: str) -> None:
        kept = SentenceSplitter(keep_newlines=True).split(text)
        assert "".join(kept) == (text if text.strip() else "")
        assert all(sentence.strip() for sentence in kept)
        assert SentenceSplitter().split(text) == [sentence.strip() for sentence in kept]

    check()


def test_newlines_stay_only_on_request() -> None:
    text = "  One.\nTwo\nlines.  \n\nThree. "
    assert SentenceSplitter().split(text) == ["One.", "Two\nlines.", "Three."]
    assert SentenceSplitter(keep_newlines=True).split(text) == ["  One.\n", "Two\nlines.  \n\n", "Three. "]


def test_time_grows_with_the_length_alone() -> None:
    """No text makes the search for boundaries quadratic: twice the text takes about twice the time, not four times."""
    for unit in (". ", ".", "a.b", "\n ", "\u3002", ".'", "(. ", "' ", " ", "a" * 50):
        assert "".join(SentenceSplitter(keep_newlines=True).split(unit * 50_000 + "x")) == unit * 50_000 + "x"


def test_an_unknown_language_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--lang klingon.*english, german"):
        SentenceSplitter("klingon")
