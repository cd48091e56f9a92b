#!/usr/bin/env python3
"""Cut a class-balanced subset out of the full Fashion-MNIST files.

    apt-get download dataset-fashion-mnist && dpkg-deb -x dataset-fashion-mnist_*.deb x
    python3 make.py x/usr/share/datasets/fashion-mnist

The first 600 training and the first 200 test pictures of each of the 10 classes, in the order of the
original files. Standard library only; the gzip header carries no name and no time.
`--check` compares the uncompressed contents with the committed files and writes nothing.
"""

import argparse
import gzip
import io
import pathlib
import struct
import sys

SPLITS = {"train": ("train", 600), "test": ("t10k", 200)}
CLASSES = 10


def read(folder, stem):
    images = gzip.decompress((folder / f"{stem}-images-idx3-ubyte.gz").read_bytes())
    labels = gzip.decompress((folder / f"{stem}-labels-idx1-ubyte.gz").read_bytes())
    magic, n, h, w = struct.unpack(">IIII", images[:16])
    assert (magic, h, w) == (0x803, 28, 28) and struct.unpack(">II", labels[:8]) == (0x801, n)
    assert len(images) == 16 + n * h * w and len(labels) == 8 + n
    return images[16:], labels[8:]


def cut(images, labels, per_class):
    seen = [0] * CLASSES
    keep = []
    for i, c in enumerate(labels):
        if seen[c] < per_class:
            seen[c] += 1
            keep.append(i)
    assert seen == [per_class] * CLASSES
    pixels = b"".join(images[i * 784:(i + 1) * 784] for i in keep)
    return (struct.pack(">IIII", 0x803, len(keep), 28, 28) + pixels,
            struct.pack(">II", 0x801, len(keep)) + bytes(labels[i] for i in keep))


def gz(data):
    out = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", fileobj=out, compresslevel=9, mtime=0) as f:
        f.write(data)
    return out.getvalue()


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("source", type=pathlib.Path, help="folder with the four original .gz files")
    ap.add_argument("--check", action="store_true")
    args = ap.parse_args()
    here = pathlib.Path(__file__).resolve().parent
    bad = 0
    for split, (stem, per_class) in SPLITS.items():
        for kind, data in zip(("images.idx3", "labels.idx1"), cut(*read(args.source, stem), per_class)):
            path = here / f"{split}-{kind}.gz"
            if args.check:
                same = path.exists() and gzip.decompress(path.read_bytes()) == data
                bad += not same
                print(f"{path.name}: {'same' if same else 'DIFFERS'}")
            else:
                path.write_bytes(gz(data))
                print(f"{path.name}: {path.stat().st_size} bytes, {struct.unpack('>I', data[4:8])[0]} items")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
