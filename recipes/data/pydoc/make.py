#!/usr/bin/env python3
"""Make train.txt, heldout.txt, LICENSE and tokenizer.json from Debian's python3.11-doc.

    apt-get download python3.11-doc && dpkg-deb -x python3.11-doc_*.deb x
    python3 make.py x/usr/share/doc/python3.11/html/_sources

The split is by whole files: a file listed in HELDOUT is never in train.txt. Needs `tokenizers`.
`--check` writes nothing and fails unless the committed files equal what would be written.
"""

import argparse
import pathlib
import sys

RELEASE = "3.11.2"
VOCAB = 1024
EOT = "<|endoftext|>"

# Whole folders, every .rst.txt file in them; then single library pages.
FOLDERS = ["tutorial", "howto", "reference", "faq"]
LIBRARY = """abc array bisect collections collections.abc contextlib copy csv dataclasses dis
enum fractions functions functools glob hashlib heapq io itertools json math operator pathlib
random shutil statistics string struct textwrap time timeit weakref""".split()

HELDOUT = """
faq/design.rst.txt
howto/sockets.rst.txt
howto/sorting.rst.txt
library/collections.rst.txt
library/heapq.rst.txt
library/random.rst.txt
reference/executionmodel.rst.txt
tutorial/errors.rst.txt
tutorial/stdlib.rst.txt
""".split()

# Left out of both: indexes, one-line pages, and a long page about a tool inside CPython.
SKIP = {"howto/clinic.rst.txt",
        "howto/cporting.rst.txt", "howto/index.rst.txt", "faq/index.rst.txt", "tutorial/index.rst.txt",
        "reference/index.rst.txt", "reference/grammar.rst.txt"}


def page_lists(sources):
    pages = [p.relative_to(sources).as_posix() for f in FOLDERS for p in (sources / f).glob("*.rst.txt")]
    pages += [f"library/{name}.rst.txt" for name in LIBRARY]
    pages = sorted(set(pages) - SKIP)
    missing = [p for p in HELDOUT if p not in pages]
    if missing:
        sys.exit(f"error: held-out pages that are not among the chosen pages: {missing}")
    return [p for p in pages if p not in HELDOUT], HELDOUT


def join(sources, pages):
    """Pages in sorted order, each ending in one newline, a blank line between two."""
    texts = [(sources / p).read_bytes().decode("utf-8").replace("\r\n", "\n").strip("\n") + "\n" for p in pages]
    return "\n".join(texts)


def licence(sources):
    """The terms section of the documentation's own licence page."""
    text = (sources / "license.rst.txt").read_text("utf-8")
    start = text.index("Terms and conditions for accessing or otherwise using Python")
    end = text.index("Licenses and Acknowledgements for Incorporated Software")
    body = text[start:end].rstrip().removesuffix(".. _OtherLicenses:").rstrip()
    return (f"train.txt and heldout.txt are part of the documentation of Python {RELEASE},\n"
            f"Copyright (c) 2001-2023 Python Software Foundation; All Rights Reserved.\n"
            f"They are distributed under the terms below, taken from that documentation's\n"
            f"page license.rst. The only change made: pages were selected and concatenated.\n\n\n"
            + body.replace("|release|", RELEASE) + "\n")


def train_tokenizer(text):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tok.post_processor = processors.ByteLevel(trim_offsets=False)
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, min_frequency=2, special_tokens=[EOT], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    # Whole lines with their newline, so that newline and indentation runs are counted as they are used.
    tok.train_from_iterator(text.splitlines(keepends=True), trainer)
    return tok


def check_tokenizer(tok, text):
    assert tok.get_vocab_size() == VOCAB, tok.get_vocab_size()
    assert tok.token_to_id(EOT) == 0
    samples = [text, "", " ", "\t\n  \r\n", "naïve ÅÄ 日本語 עברית 🙂👩‍👩‍👧", "".join(map(chr, range(0x3000)))]
    samples += [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000 and c % 97 == 0]
    for s in samples:
        ids = tok.encode(s).ids
        assert 0 not in ids
        assert tok.decode(ids, skip_special_tokens=False) == s, s[:40]
    # Every one of the 256 byte values has a token of its own, so any bytes can be spelt.
    from tokenizers import pre_tokenizers
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    assert len(alphabet) == 256 and all(tok.token_to_id(c) is not None for c in alphabet)


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("sources", type=pathlib.Path, help="the html/_sources folder")
    ap.add_argument("--check", action="store_true", help="compare with the committed files, write nothing")
    args = ap.parse_args()
    here = pathlib.Path(__file__).resolve().parent

    train, heldout = page_lists(args.sources)
    train_text = join(args.sources, train)
    tok = train_tokenizer(train_text)
    check_tokenizer(tok, train_text)
    outputs = {
        "train.txt": train_text,
        "heldout.txt": join(args.sources, heldout),
        "pages.txt": "".join(f"{split} {p}\n" for split, ps in (("train", train), ("heldout", heldout)) for p in ps),
        "LICENSE": licence(args.sources),
        "tokenizer.json": tok.to_str(pretty=True) + "\n",
    }
    bad = 0
    for name, text in outputs.items():
        path = here / name
        data = text.encode("utf-8")
        if args.check:
            same = path.exists() and path.read_bytes() == data
            bad += not same
            print(f"{name}: {'same' if same else 'DIFFERS'}")
        else:
            path.write_bytes(data)
            print(f"{name}: {len(data)} bytes")
    print(f"train {len(train)} pages, {len(tok.encode(train_text).ids)} tokens; "
          f"heldout {len(heldout)} pages, {len(tok.encode(outputs['heldout.txt']).ids)} tokens")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
