"""Mistakes of users, a row for each, and the message that each gets: what is wrong, where, and the remedy."""

from __future__ import annotations

import shlex
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from PIL import Image

from tessera.shared.cli.connection import client_of
from tessera.shared.methods.registry import methods
from tessera.shared.model.dataset_schema import DatasetSchema, TensorSchema
from tests.support.cli import NOWHERE, tessera
from tests.support.coordinator import LiveCoordinator
from tests.support.federation import ScriptedWorker, model_folder, small_model, start_run, values
from tests.support.pretrained import bert_tokenizer
from tests.support.processes import free_port

MODEL = small_model()

RUN = """
name = "trial"
dataset = "notes"
rounds = 2
[method]
name = "fedavg"
[cohort]
size = 1
[training]
learning_rate = 0.1
"""

NOTES = """
[datasets.notes]
kind = "text"
file = "notes.csv"
text = "text"
label = "label"
labels = ["bad", "good"]
tokenizer = "bert"
max_length = 16
"""

PICTURES = """
[datasets.pictures]
kind = "images"
folder = "pictures"
size = 8
"""

WORKER = f"""
url = "{NOWHERE}"
token = "secret"
name = "gpu-1"
state_dir = "state"
device = "cpu"
{NOTES}
[policy]
approve_runs = true
"""

SIMULATION = f"""{RUN}
[simulation]
sites = 2
data = {{ kind = "digits", part = {{ scheme = "iid" }} }}
"""

MISSPELT_ROLE = """
from tessera.shared.methods.base import CoordinatorHalf, Method, MethodSettings, Plan
from tessera.shared.model.selectors import roles

class Half(CoordinatorHalf[MethodSettings]):
    def plan_for(self, state, worker):
        return Plan(train=roles("haed"))

METHOD = Method(name="misspelt", coordinator=Half, source="nowhere")
"""

FILES = {
    "run.toml": RUN,
    "notes.toml": NOTES,
    "pictures.toml": PICTURES,
    "worker.toml": WORKER,
    "sim.toml": SIMULATION,
}

RAW = (
    "Traceback",
    "Value error,",
    "[Errno",
    "Generic URL error",
    "pydantic",
    "click",
    "sqlalche",
    "pyarrow",
    "obstore",
    "httpx",
    "HTTP 4",
    "No such command",
    "Input should be",
    "Extra inputs",
    "Field required",
    "Couldn't instantiate",
    "from_pretrained(",
    "ValueError",
    "OSError",
    "ConnectError",
    "ArrowInvalid",
    "SafetensorError",
    "Exception",
    "_ssl.c",
)
"""What the libraries say themselves, and the names of their classes."""


@dataclass(frozen=True)
class Mistake:
    command: str
    told: tuple[str, ...]
    """What is wrong and where."""
    remedy: str
    edit: tuple[str, str] = ("", "")
    """A text of the file that the command names, and the one that the user writes in its place."""
    environment: dict[str, str] = field(default_factory=dict)


def run(old: str, new: str, *told: str, remedy: str = "Correct these settings and try again.") -> Mistake:
    return Mistake("run preview run.toml --model model", told, remedy, (old, new))


def data(old: str, new: str, *told: str, remedy: str, file: str = "notes") -> Mistake:
    return Mistake(f"data show {file}.toml", told, remedy, (old, new))


def worker(old: str, new: str, *told: str, remedy: str) -> Mistake:
    return Mistake("worker check --config worker.toml", told, remedy, (old, new))


def serve(*told: str, remedy: str, command: str = "coordinator serve", **environment: str) -> Mistake:
    given = {f"TESSERA_{name}": value for name, value in ({"PORT": str(free_port())} | environment).items()}
    return Mistake(command, told, remedy, environment=given)


MISTAKES = {
    # ------------------------------------------------------------ a run's file
    "unknown key": run(
        "rounds = 2", "roundz = 2", "run.toml", "/roundz: unknown key", remedy="did you mean `rounds`?"
    ),
    "training key": run("learning", "lerning", "/training/lerning_rate", remedy="did you mean `learning_rate`?"),
    "training table": run("[training]", "[trainig]", "/trainig", remedy="did you mean `training`?"),
    "method": run("fedavg", "fedagv", "/method/name: there is no method 'fedagv'", remedy="did you mean `fedavg`?"),
    "method setting": run(
        '"fedavg"', '"safl"\nsettings = {layerz = 2}', "/method/settings/layerz", remedy="did you mean `layers`?"
    ),
    "negative rounds": run("= 2", "= -2", "/rounds: must be at least 0"),
    "rounds as text": run("= 2", '= "many"', "/rounds: must be a whole number"),
    "quorum over size": run(
        "size = 1", "size = 2\nquorum = 5", "/cohort: a quorum of 5 cannot come from a cohort of 2"
    ),
    "TOML": run("rounds = 2", "rounds = = 2", "run.toml is not TOML", "line 4, column 10"),
    "name": run('"trial"', '"my trial!"', "/name: must be up to 64 letters"),
    "site": run("size = 1", 'size = 1\nsites = ["suoth"]', "no worker", "'suoth'", remedy="did you mean `south`?"),
    "codec": run("= 2", '= 2\ncodec = "int9"', "/codec", "['int9']", remedy="did you mean `int8`?"),
    "optimizer": run(
        "0.1",
        '0.1\noptimizer = "adm"',
        "/training/optimizer: must be `adamw` or `sgd`",
        remedy="did you mean `adamw`?",
    ),
    "learning rate": run("0.1", "-1", "/training/learning_rate: must be greater than 0"),
    "privacy": run(
        "= 2",
        "= 2\nprivacy = {epsilon = -1, delta = 2}",
        "/privacy/epsilon: must be greater than 0",
        "/privacy/delta: must be less than 0.1",
    ),
    "no data set": run('dataset = "notes"\n', "", "/dataset: required, but missing"),
    "data set of nobody": run('"notes"', '"nodes"', "south/w", "no data set nodes", remedy="it has notes, pictures"),
    "images for a model of texts": run(
        '"notes"',
        '"pictures"',
        "its data set pictures",
        remedy="the model takes input_ids; the data set gives pixel_values",
    ),
    "safl with privacy": run(
        '"fedavg"',
        '"safl"\n[privacy]\nepsilon = 3\ndelta = 0.001\nclip_norm = 1',
        "/method: SAFL reads the data",
        remedy="set privacy.selection to noisy",
    ),
    "lora without adapters": run('"fedavg"', '"lora"', "/method", "adapters", remedy="--lora-rank"),
    "pfeddc without prompts": run('"fedavg"', '"pfeddc"', "/method", "prompts", remedy="--vision-prompts N"),
    "block of a method": run(
        '"fedavg"',
        '"fedper"\nsettings = {private = [{names = ["haed.*"]}]}',
        "/method: no block matches {{'names': ['haed.*']}}",
        remedy="name blocks of the model in method.settings",
    ),
    "robust rule": run("= 2", '= 2\nrobust = {rule = "medain"}', "/robust", remedy="did you mean `median`?"),
    "quorum over workers": run(
        "size = 1", "size = 5\nquorum = 5", "south/w", remedy="1 would take part now, fewer than the quorum of 5"
    ),
    "no run file": Mistake(
        "run create rum.toml --model model", ("there is no file or folder rum.toml",), "did you mean `run.toml`?"
    ),
    "no run file like it": Mistake(
        "run create trial-7.toml --model model",
        ("there is no file or folder trial-7.toml",),
        "tessera run init METHOD --out trial-7.toml",
    ),
    "setting without value": Mistake(
        "run preview run.toml --model model --set rounds",
        ("--set 'rounds' is not KEY=VALUE",),
        "--set cohort.quorum=2",
    ),
    "unknown setting": Mistake(
        "run preview run.toml --model model --set training.epoch=3",
        ("/training/epoch: unknown key",),
        "did you mean `epochs`?",
    ),
    "init of no method": Mistake(
        "run init fedagv", ("there is no method 'fedagv'", "TESSERA_METHODS is not set"), "did you mean `fedavg`?"
    ),
    "init for no data set": Mistake(
        'run init fedavg --dataset "my notes"', ("--dataset: 'my notes' is no name of a data set",), "letters, digits"
    ),
    "broken file of methods": Mistake(
        "run init broken",
        ("there is no method 'broken'", "skipped: methods/broken.py"),
        "No module named 'no_such_package'",
        environment={"TESSERA_METHODS": "methods"},
    ),
    "role in a file of methods": Mistake(
        "run preview run.toml --model model",
        ("the method selects blocks that the model does not have", "there is no role 'haed'"),
        "did you mean `head`?",
        ("fedavg", "misspelt"),
        environment={"TESSERA_METHODS": "methods"},
    ),
    "no folder of methods": Mistake(
        "run init broken",
        ("TESSERA_METHODS names nowhere, which is not a folder",),
        "create it or remove it there",
        environment={"TESSERA_METHODS": "nowhere"},
    ),
    # ------------------------------------------------------------ a model's folder
    "labels without classes": Mistake(
        "model init m --config plain --head causal-lm --labels a,b --random",
        ("--labels: a model with the head causal-lm has no classes",),
        "leave it out",
    ),
    "no model": Mistake("run create run.toml --model none", ("there is no folder none",), "tessera model init"),
    "file for a model": Mistake(
        "run create run.toml --model notes.csv", ("notes.csv is a file, not a model's folder",), "tessera model init"
    ),
    "transformers folder": Mistake(
        "run create run.toml --model plain",
        ("plain is a folder of transformers",),
        "tessera model init plain-tessera --config plain",
    ),
    "empty model": Mistake(
        "run create run.toml --model empty", ("empty/blocks.json cannot be read",), "tessera model init"
    ),
    "no config": Mistake(
        "model init m --config ./nobody --head features --random",
        ("there is no file or folder nobody",),
        "name a folder that `save_pretrained` has written",
    ),
    "config like it": Mistake(
        "model init m --config ./plian --head features",
        ("there is no file or folder plian",),
        "did you mean `plain`?",
    ),
    "broken config": Mistake(
        "model init m --config broken --head features",
        ("broken/config.json is not JSON", "line 1 column 2"),
        "Save the config again with `save_pretrained`",
    ),
    "folder without config": Mistake(
        "model init m --config empty --head features", ("empty has no config.json",), "`save_pretrained`"
    ),
    "head of another model": Mistake(
        "model init m --config plain --head image-classification --random",
        ("a bert cannot have the head image-classification",),
        "it can: text-classification",
    ),
    "head": Mistake(
        "model init m --config plain --head text-clasification",
        ("'--head'", "must be"),
        "did you mean `text-classification`?",
    ),
    "model exists": Mistake(
        "model init model --config plain --head features --random",
        ("model exists already",),
        "Remove it or choose another name",
    ),
    "no weights": Mistake(
        "model init m --config bare --head features", ("there are no weights beside bare",), "--random"
    ),
    "broken weights": Mistake(
        "model init m --config plain --head features",
        ("the weights of plain cannot be read as a bert: the file is damaged",),
        "`save_pretrained`",
    ),
    # ------------------------------------------------------------ connection and token
    "URL without scheme": Mistake(
        "run list",
        ("'localhost:8470' is not a coordinator's URL",),
        "https://",
        environment={"TESSERA_URL": "localhost:8470"},
    ),
    "nobody answers": Mistake(
        "run list",
        (f"no answer from the coordinator at {NOWHERE}: Connection refused",),
        "Check the URL",
        environment={"TESSERA_URL": NOWHERE},
    ),
    "URL of the API": Mistake(
        "run list",
        ("GET /v1/v1/runs: Not Found",),
        "a coordinator's has no path such as /page or /v1",
        environment={"TESSERA_URL": "{url}/v1"},
    ),
    "URL in quotation marks of Word": Mistake(
        "run list",
        ("it has a space, a quotation mark",),
        "TESSERA_URL",
        environment={"TESSERA_URL": "\u201c{url}\u201d"},
    ),
    "plain HTTP": Mistake(
        "run list",
        ("http://example.org is plain HTTP",),
        "Use https://",
        environment={"TESSERA_URL": "http://example.org"},
    ),
    "TLS to plain HTTP": Mistake(
        "run list",
        ("the server does not speak TLS",),
        "http:// is for loopback alone",
        environment={"TESSERA_URL": "https{rest}"},
    ),
    "unknown token": Mistake(
        "run list",
        ("this token is not known here",),
        "Ask an administrator",
        environment={"TESSERA_TOKEN": "tessera_admin_x"},
    ),
    "no token": Mistake(
        "run list", ("the request carries no bearer token",), "--token-file", environment={"TESSERA_TOKEN": ""}
    ),
    "no token file": Mistake(
        "run list",
        ("the token in none cannot be read: there is no file or folder none",),
        "--token-file",
        environment={"TESSERA_TOKEN": "", "TESSERA_TOKEN_FILE": "none"},
    ),
    "viewer": Mistake(
        "run create run.toml --model model",
        ("this needs a token of role", "yours has role viewer"),
        "ask an administrator",
        environment={"TESSERA_TOKEN": "{viewer}"},
    ),
    "misspelt variable": Mistake(
        "run list",
        ("TESSERA_TOKNE is no setting",),
        "did you mean TESSERA_TOKEN?",
        environment={"TESSERA_TOKNE": "x"},
    ),
    "no CA": Mistake(
        "run list",
        ("ca_bundle: none cannot be used: No such file or directory",),
        "PEM",
        environment={"TESSERA_CA_BUNDLE": "none", "TESSERA_URL": "https://x"},
    ),
    # ------------------------------------------------------------ commands, runs, sites and tokens
    "command": Mistake("runs list", ("there is no command 'runs'",), "did you mean `run`?"),
    "command of a group": Mistake("admin token creat", ("there is no command 'creat'",), "did you mean `create`?"),
    "delete a run": Mistake("run delete test", ("there is no command 'delete'",), "did you mean `cancel`?"),
    "stop a run": Mistake("run stop test", ("there is no command 'stop'",), "did you mean `pause` or `cancel`?"),
    "logs of a run": Mistake("run logs test", ("there is no command 'logs'",), "did you mean `show` or `watch`?"),
    "clone a run": Mistake("run clone test", ("there is no command 'clone'",), "did you mean `create`"),
    "edit a run": Mistake("run edit test", ("there is no command 'edit'",), "did you mean `change` or `annotate`"),
    "results of a run": Mistake("run results test", ("there is no command 'results'",), "did you mean `metrics`"),
    "a word like that of another deed": Mistake(
        "worker delete", ("there is no command 'delete'; it can be adopt",), "withhold"
    ),
    "a word of many groups": Mistake("model list", ("there is no command 'list'; it can be blocks",), "merge"),
    "start a worker": Mistake("worker start", ("there is no command 'start'",), "did you mean `run`?"),
    "status of a worker": Mistake("worker status", ("there is no command 'status'",), "did you mean `check` or"),
    "date in words": Mistake(
        "worker approve trial --config worker.toml --until morgen",
        ("'--until': must be a date",),
        "such as",
    ),
    "run that asked for nothing": Mistake(
        "worker approve trial --config worker.toml", ("no run 'trial' has requested",), "tessera worker inbox"
    ),
    "remove a site": Mistake("admin site remove x", ("there is no command 'remove'",), "did you mean `suspend`?"),
    "command of another group": Mistake(
        "status", ("there is no command 'status'",), "did you mean `tessera admin status`?"
    ),
    "command of two other groups": Mistake(
        "approve x",
        ("there is no command 'approve'",),
        "did you mean `tessera admin join approve` or `tessera worker approve`?",
    ),
    "folder named like a file": Mistake(
        "run export test out.pt", ("out.pt is a file's name, and a model folder would be written",), "without .pt"
    ),
    "model named like a file": Mistake(
        "model init m.onnx --config plain --head features", ("m.onnx is a file's name",), "without .onnx"
    ),
    "option": Mistake("run list --jsn", ("No such option: --jsn",), "--json"),
    "number": Mistake(
        "admin audit --limit many", ("'--limit': must be a whole number",), "tessera admin audit --help"
    ),
    "run": Mistake("run pause tets", ("there is no run 'tets'",), "did you mean 'test'?"),
    "version": Mistake(
        "run export test out --version 9", ("run test has no version 9",), "It has the versions 0 to 0"
    ),
    "version as text": Mistake(
        "run export test out --version newest", ("'newest' is not a version",), "`latest` or `best`"
    ),
    "best of none": Mistake(
        "run export test out --version best", ("no version of run test has been evaluated",), "[evaluation]"
    ),
    "export exists": Mistake("run export test empty --model model", ("empty exists already",), "choose another name"),
    "metrics to no folder": Mistake(
        "run metrics test --parquet no/a.parquet",
        ("no/a.parquet cannot be written: No such file or directory",),
        "Create the folder no.",
    ),
    "site name": Mistake("admin site add 'my site'", ("'my site': must be up to 64 letters",), "--help"),
    "site twice": Mistake(
        "admin site add south", ("there is a site 'south' already",), "Use it, or choose another name"
    ),
    "suspended site": Mistake("admin site suspend suoth", ("there is no site 'suoth'",), "did you mean 'south'?"),
    "role": Mistake("admin token create x --role amdin", ("'--role'", "must be `admin`"), "did you mean `admin`?"),
    "site token without site": Mistake(
        "admin token create x --role site", ("'--site'", "a token of role site needs it"), "--site NAME"
    ),
    "site for a viewer": Mistake(
        "admin token create x --role viewer --site south",
        ("'--site'", "a token of role viewer has no site"),
        "leave it out",
    ),
    "token of no site": Mistake(
        "admin token create x --role site --site suoth", ("/site: there is no site 'suoth'",), "did you mean `south`?"
    ),
    "token": Mistake("admin token revoke nobody", ("there is no token 'nobody'",), "tessera admin token list"),
    "code": Mistake(
        "admin join approve AAAA-BBBB --site south",
        ("no worker waits under the code 'AAAA-BBBB'",),
        "tessera admin join list",
    ),
    # ------------------------------------------------------------ a site's data
    "no tokenizer": data(
        '"bert"', '"empty"', "datasets.notes.tokenizer: empty cannot be loaded", remedy="`save_pretrained`"
    ),
    "tokenizer without words": data(
        '"bert"',
        '"wordless"',
        "datasets.notes.tokenizer: wordless",
        "vocabulary",
        remedy="Save the model's tokenizer there too",
    ),
    "foreign tokenizer": data(
        '"bert"',
        '"foreign"',
        "foreign knows none of the texts' words",
        remedy="Use the tokenizer that the model was trained with",
    ),
    "kind": data('"text"', '"txt"', "datasets.notes.kind: there is no 'txt'", remedy="did you mean `text`?"),
    "data option": data(
        "max_length", "max_lenght", "datasets.notes.max_lenght: unknown key", remedy="did you mean `max_length`?"
    ),
    "data file": data(
        "notes.csv",
        "nodes.csv",
        "datasets.notes.file: there is no file or folder nodes.csv",
        remedy="did you mean `notes.csv`?",
    ),
    "label column": data('label = "label"', 'label = "lable"', "datasets.notes.label", "lable", remedy="label"),
    "text column": data('text = "text"', 'text = "note"', "datasets.notes.text", "note", remedy="text"),
    "text column in capitals": data(
        'text = "text"', 'text = "Text"', "notes.csv has no column 'Text'", remedy="did you mean `text`?"
    ),
    "unknown label": data(
        "notes.csv",
        "odd.csv",
        "odd.csv has 'worse', not among the 2 names in `labels`",
        remedy="correct it, or add it there",
    ),
    "class without example": data('["bad", "good"]', '["bad", "good", "fair"]', "fair", remedy="absent"),
    "labels left out": data('labels = ["bad", "good"]\n', "", "datasets.notes.label", remedy="labels"),
    "empty file": data(
        "notes.csv",
        "none.csv",
        "datasets.notes.file: none.csv cannot be read: it is empty",
        remedy="correct it, or name another",
    ),
    "arrow file": data("notes.csv", "notes.arrow", "notes.arrow", remedy=".parquet"),
    "pickled file": data("notes.csv", "notes.pkl", "notes.pkl", remedy=".parquet"),
    "broken Parquet": data(
        "notes.csv",
        "broken.parquet",
        "broken.parquet cannot be read: it is damaged",
        remedy="correct it, or name another",
    ),
    "held out": data(
        "max_length = 16", "held_out = 2", "notes.toml: datasets.notes.held_out", remedy="must be less than 1"
    ),
    "no such data set": Mistake(
        "data show notes.toml --dataset nodes", ("there is no data set 'nodes'",), "did you mean `notes`?"
    ),
    "no data file": Mistake(
        "data show nots.toml", ("there is no file or folder nots.toml",), "did you mean `notes.toml`?"
    ),
    "broken image": data(
        "size = 8",
        'size = 8\nlabels = ["cat"]',
        "pictures/cat/a.png cannot be read: it is none of PNG",
        remedy="replace it or take it out",
        file="pictures",
    ),
    "image classes": data(
        "",
        "",
        "datasets.pictures.folder: pictures has 'cat'",
        remedy="list the classes' names in `labels`",
        file="pictures",
    ),
    "no images": data(
        '"pictures"\nsize',
        '"empty"\nsize',
        "datasets.pictures.folder: empty contains no images (.bmp",
        remedy="name one with folders of them",
        file="pictures",
    ),
    "DICOM": data(
        '"pictures"\nsize',
        '"scans"\nsize',
        "scans",
        ".dcm",
        remedy="set dicom = true to read DICOM files",
        file="pictures",
    ),
    "image folder": data(
        '"pictures"\nsize',
        '"pictrues"\nsize',
        "datasets.pictures.folder: there is no file or folder pictrues",
        remedy="did you mean `pictures`?",
        file="pictures",
    ),
    "images without classes": data(
        '"pictures"\nsize',
        '"loose"\nsize',
        "loose/a.png is not in the folder of a class",
        remedy="move it into one",
        file="pictures",
    ),
    "image size": data(
        "size = 8",
        "image_size = [8, 8]",
        "datasets.pictures.image_size: unknown key",
        remedy="did you mean `image`?",
        file="pictures",
    ),
    "no size": data("size = 8", "", "datasets.pictures", remedy="give either processor or size", file="pictures"),
    "data init of nothing": Mistake("data init nobody", ("there is no file or folder nobody",), "check the path"),
    "data init of an empty folder": Mistake(
        "data init empty", ("empty contains no table (.csv", "it contains nothing"), "name another"
    ),
    "data init of a program": Mistake("data init notes.pkl", ("notes.pkl",), ".parquet"),
    # ------------------------------------------------------------ a worker's settings
    "no settings": Mistake(
        "worker run --config nobody.toml",
        ("there is no file or folder nobody.toml",),
        "`tessera worker join` writes one",
    ),
    "no --config": Mistake(
        "worker inbox", ("Missing option '--config'",), "For the settings that lie here, add --config worker.toml"
    ),
    "quotation marks of Word": worker(
        'name = "gpu-1"', "name = \u201cgpu-1\u201d", "is not TOML", "at line 4", remedy="plain one of the keyboard"
    ),
    "text without quotation marks": worker(
        'name = "gpu-1"', "name = gpu-1", "is not TOML", "at line 4", remedy="put text between double quotes"
    ),
    "path of Windows": worker(
        '"state"', '"C:\\state"', "is not TOML", "at line 5", remedy="or put the path between single quotes"
    ),
    "table twice": worker(
        "[policy]",
        "[policy]\nairlock = true\n[policy]",
        "the table [policy] is there twice (at line",
        remedy="write the lines of both under one",
    ),
    "decimal comma": worker(
        "max_length = 16", "held_out = 0,2", "is not TOML", remedy="write a decimal number with a point"
    ),
    "True in a policy": worker("approve_runs = true", "approve_runs = True", "is not TOML", remedy="true or false"),
    "colon for =": worker("approve_runs = true", "approve_runs: true", "is not TOML", remedy="write key = value"),
    "quotation mark left out": worker('"state"', '"state', "is not TOML", remedy="a quotation mark is missing"),
    "file of Word": run('"trial"', "\u201etrial\u201c", "run.toml is not TOML", remedy="plain one of the keyboard"),
    "token file": worker(
        'token = "secret"',
        'token_file = "worker.tokn"',
        "token_file: worker.tokn cannot be read as a token: there is no file or folder worker.tokn",
        # Not worker.toml, which is no token.
        remedy="worker.tokn; check the path",
    ),
    "state in a folder that is not there": worker(
        '"state"',
        '"stat/deep"',
        "worker.toml: state_dir: there is no folder stat",
        remedy="create it, or correct state_dir",
    ),
    "audit in a folder that is not there": worker(
        'device = "cpu"', 'audit_dir = "no/audit"', "audit_dir: there is no folder no", remedy="correct audit_dir"
    ),
    "state in a file": worker('"state"', '"notes.csv"', "state_dir: notes.csv is a file", remedy="name a folder"),
    "decimal comma in a size": worker(
        "approve_runs = true",
        'max_upload_bytes = "2,5 MB"',
        "policy.max_upload_bytes: must be a number of bytes",
        remedy="such as 5000000 or '5 MB'",
    ),
    "unit of a rate": worker(
        "approve_runs = true",
        'max_upload_bytes_per_second = "2 potatoes"',
        "policy.max_upload_bytes_per_second: must be a number of bytes",
        remedy="such as 5000000 or '5 MB'",
    ),
    "worker key": worker("device", "devise", "worker.toml: devise: unknown key", remedy="did you mean `device`?"),
    "device": worker('"cpu"', '"gpu"', "device: must be auto, cpu, cuda", remedy="such as cuda:0"),
    "policy key": worker(
        "approve", "aprove", "policy.aprove_runs: unknown key", remedy="did you mean `approve_runs`?"
    ),
    "policy value": worker(
        "= true", '= "perhaps"', "worker.toml: policy.approve_runs", remedy="must be true or false"
    ),
    "hours": worker(
        "approve_runs = true",
        'hours = ["25:00-26:00"]',
        "policy.hours.0: '25:00-26:00' is no time of the week",
        remedy="such as 'Mon-Fri 19:00-07:00'",
    ),
    "worker TOML": worker("approve_runs = true", "approve_runs = ", "worker.toml is not TOML", remedy="line"),
    "worker without data": worker(NOTES, "", "datasets", remedy="Add a table [datasets.NAME]"),
    "worker variable": Mistake(
        "worker check --config worker.toml",
        ("TESSERA_WORKER_DEVISE: no such setting",),
        "did you mean `TESSERA_WORKER_DEVICE`?",
        environment={"TESSERA_WORKER_DEVISE": "cpu"},
    ),
    "join without site": Mistake(
        "worker join {url} --config new.toml", ("'--site': give either the site, or the file",), "--help"
    ),
    "worker name": Mistake(
        "worker join {url} --site south --name 'bad name' --config new.toml",
        ("'bad name': must be up to 64 letters",),
        "--help",
    ),
    "join beside a token of something else": Mistake(
        "worker join {url} --site south --config other.toml --name w",
        ("other.token holds a secret, and no settings name its coordinator",),
        "choose another name for the settings with --config",
    ),
    "join to a page": Mistake(
        "worker join {url}/page --site south --config new.toml --name w",
        ("/page/v1/enrolments: Method Not Allowed",),
        "a coordinator's has no path such as /page or /v1",
    ),
    "join over plain HTTP": Mistake(
        "worker join http://example.org --site south --config new.toml",
        ("http://example.org is plain HTTP",),
        "Use https://",
    ),
    # ------------------------------------------------------------ a simulation
    "no simulation file": Mistake(
        "simulate simm.toml", ("there is no file or folder simm.toml",), "did you mean `sim.toml`?"
    ),
    "no simulation table": Mistake("simulate run.toml", ("run.toml has no [simulation] table",), "[simulation.data]"),
    "simulation key": Mistake(
        "simulate sim.toml --model model",
        ("/simulation/stes: unknown key",),
        "did you mean `sites`?",
        ("sites = 2", "stes = 2"),
    ),
    "simulation without model": Mistake("simulate sim.toml", ("model",), "--model"),
    "seeds": Mistake(
        "simulate sim.toml --model model --seeds one",
        ("'one' is no list of different whole numbers",),
        "such as 0,1,2",
    ),
    "no folder to compare": Mistake("compare modell model", ("there is no file or folder modell",), "mean `model`?"),
    "folder of no simulation": Mistake(
        "compare model .", ("model has no finished simulation",), "Give an output folder of `tessera simulate`."
    ),
    "one folder to compare": Mistake("compare model", ("two different folders",), "Name each output folder once."),
    # ------------------------------------------------------------ a coordinator
    "variable": serve("TESSERA_PROT is no setting", remedy="did you mean TESSERA_PORT?", PROT="1"),
    "port as text": serve("setting TESSERA_PORT", remedy="must be a whole number", PORT="eighty"),
    "port taken": serve(
        "cannot listen on 127.0.0.1:{port}: Address already in use", remedy="Set another TESSERA_PORT", PORT="{port}"
    ),
    "host without TLS": serve(
        "TESSERA_HOST=0.0.0.0 serves other machines without TLS",
        remedy="Set TESSERA_TLS_CERT",
        HOST="0.0.0.0",  # noqa: S104 (it is refused)
    ),
    "no certificate": serve(
        "TLS cannot be served: none.pem cannot be read: No such file or directory",
        remedy="Name PEM files that this user may read in TESSERA_TLS_CERT",
        TLS_CERT="none.pem",
    ),
    "broken certificate": serve(
        "TLS cannot be served: notes.csv has no certificate in PEM",
        remedy="Name PEM files",
        TLS_CERT="notes.csv",
    ),
    "database URL": serve("not in mysql", remedy="sqlite:/// or postgresql://", DATABASE_URL="mysql://x/y"),
    "database folder": serve(
        "/dev/null/at",
        remedy="name another",
        command="coordinator migrate",
        DATABASE_URL="sqlite:////dev/null/at/all.db",
    ),
    "database in a folder that is not there": serve(
        "the database's folder",
        "/nowhere does not exist",
        remedy="create it, or name another in TESSERA_DATABASE_URL",
        command="coordinator token",
        DATABASE_URL="sqlite:///nowhere/tessera.db",
    ),
    "blobs in a folder that is not there": serve(
        "nowhere/blobs: No such file or directory",
        remedy="create the folder around it, or correct its name",
        command="coordinator doctor",
        DATABASE_URL="sqlite:///new.db",
        BLOB_URL="nowhere/blobs",
    ),
    "token of a database that is not there": serve(
        "typo.db is not up to date",
        remedy="tessera coordinator migrate",
        command="coordinator token",
        DATABASE_URL="sqlite:///typo.db",
    ),
    "no database file": serve(
        "notes.csv cannot be used: it is no file of SQLite",
        remedy="name another in TESSERA_DATABASE_URL",
        command="coordinator migrate",
        DATABASE_URL="sqlite:///notes.csv",
    ),
    "schema": serve(
        "new.db is not up to date", remedy="tessera coordinator migrate", DATABASE_URL="sqlite:///new.db"
    ),
    "PostgreSQL away": serve(
        "cannot be used",
        remedy="check that the server runs",
        command="coordinator migrate",
        DATABASE_URL="postgresql://127.0.0.1:9/x",
    ),
    "blob URL": serve(
        "TESSERA_BLOB_URL=s4://x", remedy="s3://bucket/prefix", BLOB_URL="s4://x", DATABASE_URL="sqlite:///new.db"
    ),
}


@dataclass(frozen=True)
class World:
    root: Path
    places: dict[str, str]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    root = tmp_path_factory.mktemp("world")
    for folder in ("empty", "broken", "plain", "bare", "pictures/cat", "scans/cat", "loose", "methods"):
        (root / folder).mkdir(parents=True)
    model_folder(root / "model", MODEL)
    for folder in ("plain", "bare"):
        (root / folder / "config.json").write_text('{"model_type": "bert"}')
    (root / "plain" / "model.safetensors").write_bytes(b"damaged")
    (root / "broken" / "config.json").write_text("{")
    (root / "methods" / "broken.py").write_text("import no_such_package\n")
    for table, rows in {"notes": "all well,good\nall ill,bad\n", "odd": "all well,good\nall ill,worse\n"}.items():
        (root / f"{table}.csv").write_text(f"text,label\n{rows}")
    (root / "methods" / "misspelt.py").write_text(MISSPELT_ROLE)
    (root / "other.token").write_text("secret")
    for name in ("none.csv", "notes.arrow", "notes.pkl", "broken.parquet", "pictures/cat/a.png", "scans/cat/a.dcm"):
        (root / name).write_bytes(b"" if name == "none.csv" else b"damaged")
    Image.new("L", (8, 8)).save(root / "loose" / "a.png")
    bert_tokenizer(root / "bert", ("all", "well", "ill"))
    bert_tokenizer(root / "foreign", ("tout", "va", "bien"))
    bert_tokenizer(root / "wordless", ())
    with LiveCoordinator(root / "coordinator") as coordinator, socket.socket() as taken:
        pictures = DatasetSchema(inputs={"pixel_values": TensorSchema(dtype="float32", shape=(3, 32, 32))})
        held = {"datasets": {"notes": 10, "pictures": 10}, "schemas": {"pictures": pictures}}
        ScriptedWorker(coordinator.client("site", "south"), **held).enrol()
        start_run(coordinator.client(), MODEL, values(MODEL))
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        places = {
            "url": coordinator.url,
            "rest": coordinator.url.removeprefix("http"),
            "admin": coordinator.token("admin"),
            "viewer": coordinator.token("viewer"),
            "port": str(taken.getsockname()[1]),
        }
        yield World(root, places)


@contextmanager
def methods_from(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process reads the methods once; here anew for a mistake that is about them."""
    if "TESSERA_METHODS" not in environment:
        yield
        return
    # For the whole process: the coordinator's threads may be the first to read them anew.
    with monkeypatch.context() as patch:
        patch.setenv("TESSERA_METHODS", environment["TESSERA_METHODS"])
        methods.cache_clear()
        yield
    methods.cache_clear()


@pytest.mark.parametrize("name", MISTAKES)
def test_each_mistake_is_told_with_its_place_and_its_remedy(
    name: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake = MISTAKES[name]
    monkeypatch.chdir(world.root)
    # A command asks again for ten seconds.
    monkeypatch.setattr(client_of, "__defaults__", (0.0,))
    for file, text in FILES.items():
        named = file in mistake.command
        assert not named or mistake.edit[0] in text
        (world.root / file).write_text(text.replace(*mistake.edit, 1) if named else text)
    command = [part.format(**world.places) for part in shlex.split(mistake.command)]
    base = {} if command[0] == "coordinator" else {"TESSERA_URL": "{url}", "TESSERA_TOKEN": "{admin}"}
    environment = {key: value.format(**world.places) for key, value in {**base, **mistake.environment}.items()}
    with methods_from(environment, monkeypatch):
        done = tessera(*command, **environment)
    print(f"## {name}: {done.returncode}\n{done.stdout}{done.stderr}")
    said = " ".join((done.stdout + done.stderr).replace("│", " ").split())
    assert done.returncode != 0
    assert not [raw for raw in RAW if raw in said]
    for piece in (*mistake.told, mistake.remedy):
        assert piece.format(**world.places) in said
    assert mistake.remedy
