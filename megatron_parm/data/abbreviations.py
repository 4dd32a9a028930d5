"""What the full stop after a word means in some languages. Floor 4. Used by data/sentences.py.

Words are in small letters and without their last full stop.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Language:
    """`never_end`: a name or more text follows ("Dr."). `before_numbers`: the same if a number follows ("Fig. 3").

    `may_end`: ends a sentence only where one of `openers`, words that open many sentences, follows ("Inc. It").
    `has_ordinals`: "3. Oktober" is one phrase.
    """

    never_end: frozenset[str]
    before_numbers: frozenset[str]
    may_end: frozenset[str]
    openers: frozenset[str]
    has_ordinals: bool = False


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_LATIN = "e.g i.e cf viz vs v ca approx resp q.v"

LANGUAGES: dict[str, Language] = {
    "english": Language(
        never_end=_words(
            f"{_LATIN} mr mrs ms mx dr prof rev fr st mt ft gen col maj capt cmdr lt sgt cpl adm brig gov sen rep "
            "pres hon supt messrs mme mlle msgr esp incl attn ed eds tr trans op"
        ),
        before_numbers=_words("no nos fig figs p pp vol vols ch chap sec sect eq eqs art par para tab ref refs"),
        may_end=_words(
            "etc al inc ltd co corp llc bros jr sr esq ph.d m.d b.a m.a d.d.s u.s u.k u.n e.u u.s.a d.c a.m p.m "
            "a.d b.c jan feb mar apr jun jul aug sep sept oct nov dec mon tue tues wed thu thurs fri sat sun ave "
            "blvd rd dept est univ assn bldg min max avg tel ext oz lb lbs ft hr hrs"
        ),
        openers=_words(
            "the a an it he she they we i you this that these those there here in on at but and if when while as "
            "for however what why how who where which his her their our my its your after before since because "
            "although though with without from by to of some many most no yes so then one two each both during "
            "not now once under over until unless such all any every another other also thus therefore still yet "
            "later today meanwhile moreover nevertheless according among between its let please"
        ),
    ),
    "german": Language(
        never_end=_words(
            "z.b z b d.h u.a u.u o.g s.o s.u v.a i.d.r bzw vgl dr prof hr fr frl st ca evtl ggf inkl exkl sog "
            "dipl ing geb gest hrsg lt max min mind u z.t z.zt zzgl gez insb bes"
        ),
        before_numbers=_words("nr s abb abs art bd kap tab ziff tel"),
        may_end=_words(
            "usw etc usf co jr jan feb apr jun jul aug sep sept okt nov dez mio mrd str o.ä u.ä n.chr v.chr"
        ),
        openers=_words(
            "der die das ein eine er sie es wir ich ihr in im am auf bei mit nach von aber und wenn als doch denn "
            "dies diese dieser dieses dort hier da so man auch nun dann was wer wie warum wo sein seine ihre"
        ),
        has_ordinals=True,
    ),
    "french": Language(
        never_end=_words("m mm mme mmes mlle mlles dr pr me mgr st ste cf ex p.ex c.-à-d env av apr j.-c éd dir"),
        before_numbers=_words("n no p pp fig vol chap art t tél"),
        may_end=_words("etc janv févr juil sept oct nov déc cie bd al"),
        openers=_words(
            "le la les l' un une des il elle ils elles on nous vous je tu ce cet cette ces dans en sur à au aux "
            "mais et si quand lorsque pour par avec sans selon puis ainsi donc or son sa ses leur leurs qui que"
        ),
    ),
    "spanish": Language(
        never_end=_words("sr sra srta sres dr dra d dña prof gral ing lic ud uds vd vds p.ej cf aprox av avda fdo"),
        before_numbers=_words("n no núm pág págs p pp fig vol cap art tel"),
        may_end=_words("etc ee.uu a.c d.c cía ene feb mar abr jun jul ago sept oct nov dic al"),
        openers=_words(
            "el la los las un una unos unas él ella ellos ellas en de con por para pero y si cuando como no este "
            "esta estos estas ese esa eso su sus según sin sobre al del lo se"
        ),
    ),
}
