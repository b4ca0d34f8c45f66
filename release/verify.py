"""python3 -I verify.py SIGNER.pub: check this bundle with the standard library and openssl, without Tessera."""

import sys

# Without -I, Python would import a json.py that somebody put beside this file.
if not sys.flags.isolated or len(sys.argv) != 2:
    sys.exit(__doc__)

import base64
import hashlib
import json
from pathlib import Path
from subprocess import run
from tempfile import NamedTemporaryFile

REMEDY = "Do not use the bundle: get another copy, and the signer's public key by another way."
folder, signature = Path(__file__).resolve().parent, "model.sig"
sealed = json.loads((folder / signature).read_bytes())["dsseEnvelope"]
kind, text = sealed["payloadType"].encode(), base64.b64decode(sealed["payload"])
with NamedTemporaryFile() as file:
    Path(file.name).write_bytes(base64.b64decode(sealed["signatures"][0]["sig"]))
    command = ["openssl", "dgst", "-sha256", "-verify", sys.argv[1], "-signature", file.name]
    done = run(
        command, input=b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(text), text), check=False, capture_output=True
    )
if done.returncode:
    sys.exit(f"{signature} is no signature by {sys.argv[1]}: {done.stderr.decode()[:200]}\n{REMEDY}")
signed = {one["name"]: one["digest"] for one in json.loads(text)["predicate"]["resources"]}
found = {}
for path in folder.rglob("*"):
    if path.is_symlink() or not path.is_dir():
        regular = path.is_file() and not path.is_symlink()
        found[path.relative_to(folder).as_posix()] = (
            hashlib.sha256(path.read_bytes()).hexdigest() if regular else "a link"
        )
found.pop(signature)
states = {name: (name in found, name in signed) for name in {*found, *signed}}
words = {(False, True): "is signed and missing", (True, False): "is not signed: it was added afterwards"}
wrong = sorted(name for name in states if found.get(name) != signed.get(name))
for name in wrong:
    print(f"{name}: {words.get(states[name], 'was changed')}")
sys.exit(REMEDY if wrong else print(f"{len(signed)} files are as the key signed them"))
