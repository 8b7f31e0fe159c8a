"""Every GLUE task: its rows, forms, labels and scores, on the real files where they are there, else on small ones.

The expected scores come from scikit-learn and scipy on the same logits, the row counts from the published table.
"""

from __future__ import annotations

import codecs
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from qtool import listing, metrics, prepare
from qtool.core import QtoolError, Unavailable
from qtool.models import Model
from qtool.tasks import find, find_all, glue
from tests.conftest import WORDS, lines_of, make_checkpoint, need, qtool, shared

NAMES = ("sst2", "mrpc", "cola", "rte", "wnli", "qnli", "qqp", "mnli", "mnli-mismatched", "stsb")
# (texts, labels as the file writes them, the same as numbers) in GLUE's column layout, {0} and {1} the texts
MNLI_COLUMNS = (
    "index|promptID|pairID|genre|sentence1_binary_parse|sentence2_binary_parse|sentence1_parse|sentence2_parse"
    "|sentence1|sentence2|label1|label2|label3|label4|label5|gold_label"
)
MNLI_ROW = "{n}|63735|63735n|slate|( {0} )|( {1} )|(ROOT {0})|(ROOT {1})|{0}|{1}|neutral|neutral|{label}|neutral|neutral|{label}"
LAYOUT = {
    "sst2": ("sentence|label", "{0}|{label}", ["0", "1"]),
    "mrpc": ("Quality|#1 ID|#2 ID|#1 String|#2 String", "{label}|702876|702977|{0}|{1}", ["0", "1"]),
    "cola": (None, "gj04|{label}||{0}", ["0", "1"]),
    "rte": ("index|sentence1|sentence2|label", "{n}|{0}|{1}|{label}", ["entailment", "not_entailment"]),
    "wnli": ("index|sentence1|sentence2|label", "{n}|{0}|{1}|{label}", ["0", "1"]),
    "qnli": ("index|question|sentence|label", "{n}|{0}|{1}|{label}", ["entailment", "not_entailment"]),
    "qqp": ("id|qid1|qid2|question1|question2|is_duplicate", "{n}|35921|41576|{0}|{1}|{label}", ["0", "1"]),
    "mnli": (MNLI_COLUMNS, MNLI_ROW, ["entailment", "neutral", "contradiction"]),
    "mnli-mismatched": (MNLI_COLUMNS, MNLI_ROW, ["entailment", "neutral", "contradiction"]),
    "stsb": (
        "index|genre|filename|year|old_index|source1|source2|sentence1|sentence2|score",
        "{n}|main-captions|MSRvid|2012test|0001|none|none|{0}|{1}|{label}",
        ["0.000", "3.800", "5.000"],
    ),
}
VALUES = {"stsb": [0.0, 3.8, 5.0]}


def written(name: str, rows: int = 12) -> tuple[str, list[str], list[str] | None, list]:
    """A file in GLUE's own layout, and what reading it must give."""
    header, row, labels = LAYOUT[name]
    values = VALUES.get(name, list(range(len(labels))))
    texts = [f'"what {n} "said" it' if n % 3 == 0 else f"text, number {n}" for n in range(rows)]
    pairs = [f"other's \u2028 {n}" for n in range(rows)]
    lines = [header] if header else []
    lines += [row.format(texts[n], pairs[n], n=n, label=labels[n % len(labels)]) for n in range(rows)]
    content = "\n".join(lines).replace("|", "\t") + "\n"
    return (
        content,
        texts,
        pairs if find(name)[0].text_pair else None,
        [values[n % len(values)] for n in range(rows)],
    )


def put(folder: Path, name: str, content: str, file: str | None = None) -> Path:
    path = folder / glue.FORMS[name].folder / (file or glue.FORMS[name].file)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode())
    return path


def load(name: str, split: str | None = None, data: Path | None = None):
    task, file = find(name)
    return file.load(task, split, data)


def model(*classes: str) -> Model:
    """A checked checkpoint of these classes, as far as labels go."""
    return Model(Path(), None, "", 0, 0, dict(enumerate(classes)), 64, 100, "bert")


def class_names(name: str) -> list[str]:
    return find(name)[0].labels or ["LABEL_0"]


def test_all_ten_tasks_are_there_and_listed_with_their_metrics_and_forms():
    assert set(NAMES) <= set(find_all())
    text = listing.tasks()
    for name in NAMES:
        paragraph = next(part for part in text.split("\n\n") if part.startswith(f"{name}: "))
        assert f"--data DIR with {glue.FORMS[name].folder}/" in paragraph
        assert find(name)[0].score in paragraph
    assert "metric   f1, accuracy" in listing.task("mrpc")
    assert "metric   spearman, pearson" in listing.task("stsb")
    assert "numbers" in listing.task("stsb")


@pytest.mark.parametrize(
    ("name", "score"),
    [("sst2", "accuracy"), ("mrpc", "f1"), ("cola", "matthews_correlation"), ("rte", "accuracy"),
     ("wnli", "accuracy"), ("qnli", "accuracy"), ("qqp", "f1"), ("mnli", "accuracy"),
     ("mnli-mismatched", "accuracy"), ("stsb", "spearman")],
)  # fmt: skip
def test_the_primary_score_is_the_published_one(name, score):
    assert find(name)[0].score == score


@pytest.mark.parametrize(
    ("name", "split", "counts"),
    [
        # published counts (GLUE, table 1; class counts as in MANIFEST.json of the shared data)
        ("sst2", "dev", {0: 428, 1: 444}),
        ("sst2", "train", {0: 29780, 1: 37569}),
        ("mrpc", "dev", {0: 129, 1: 279}),
        ("mrpc", "train", {0: 1194, 1: 2474}),
        ("cola", "dev", {0: 322, 1: 721}),
        ("cola", "train", {0: 2528, 1: 6023}),
        ("rte", "dev", {0: 146, 1: 131}),
        ("rte", "train", {0: 1249, 1: 1241}),
        ("wnli", "dev", {0: 40, 1: 31}),
        ("wnli", "train", {0: 323, 1: 312}),
    ],
)
def test_a_real_split_has_the_published_rows_and_labels(name, split, counts):
    table = load(name, split, shared("data", "glue"))
    assert {label: table.labels.count(label) for label in set(table.labels)} == counts
    assert table.notes == ()


def test_the_real_sts_b_has_ratings_as_floats():
    for split, rows in (("dev", 1500), ("train", 5749)):
        table = load("stsb", split, shared("data", "glue"))
        assert len(table) == rows
        assert table.notes == ()
        assert (min(table.labels), max(table.labels)) == (0.0, 5.0)
    path = shared("data", "glue", "STS-B", "train.tsv")
    third = path.read_text().split("\n")[2].split("\t")
    assert (table.texts[1], table.pairs[1], table.labels[1]) == (third[7], third[8], float(third[9]))


def test_the_real_qqp_sample_is_read_as_one_file_and_said_not_to_be_the_split():
    table = load("qqp", None, shared("data", "glue", "QQP", "sample4000_from_train.tsv"))
    assert (len(table), table.labels.count(0), table.labels.count(1)) == (4000, 2495, 1505)
    assert "has 4000 rows, the official validation split 40430" in table.notes[0]


def test_the_real_mrpc_keeps_its_lone_quotation_marks():
    table = load("mrpc", "dev", shared("data", "glue"))
    assert table.pairs[0] == '"The foodservice pie business does not fit our long-term growth strategy.'


def test_the_task_folder_itself_is_accepted_but_not_another_tasks():
    assert len(load("sst2", "dev", shared("data", "glue", "SST-2"))) == 872
    with pytest.raises(QtoolError, match=r"no RTE/dev.tsv"):
        load("rte", None, shared("data", "glue", "WNLI"))  # the same columns


@pytest.mark.parametrize("name", NAMES)
def test_glues_own_layout_is_read(name, tmp_path):
    content, texts, pairs, labels = written(name)
    put(tmp_path, name, content)
    table = load(name, None, tmp_path)
    assert (table.texts, table.pairs, table.labels) == (texts, pairs, labels)
    assert "has 12 rows, the official validation split" in table.notes[0]
    assert load(name, None, put(tmp_path, name, content, "mine.tsv")).labels == labels  # one file


@pytest.mark.parametrize("name", NAMES)
def test_windows_line_ends_and_a_byte_order_mark_change_nothing(name, tmp_path):
    content, texts, pairs, labels = written(name)
    path = put(tmp_path, name, "")
    path.write_bytes(codecs.BOM_UTF8 + content.replace("\n", "\r\n").encode())
    table = load(name, None, tmp_path)
    assert (table.texts, table.pairs, table.labels) == (texts, pairs, labels)


@pytest.mark.parametrize("name", NAMES)
def test_columns_go_by_name_whatever_their_order_and_company(name, tmp_path):
    content, texts, pairs, labels = written(name)
    rows = [line.split("\t") for line in content.split("\n")[:-1]]
    task, form = find(name)[0], glue.FORMS[name]
    if form.headerless:
        rows.insert(0, list(form.headerless))
    used = {*form.text, *form.pair, *form.label, task.text, task.text_pair, task.label}
    kept = [index for index, column in enumerate(rows[0]) if column in used][::-1]
    lines = [["extra", *(row[index] for index in kept), ""] for row in rows]
    lines[0][-1] = "empty"
    put(tmp_path, name, "".join("\t".join(line) + "\n" for line in lines))
    table = load(name, None, tmp_path)
    assert (table.texts, table.pairs, table.labels) == (texts, pairs, labels)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["tsv", "csv", "jsonl"])
def test_the_hub_copys_columns_and_labels_as_words_or_numbers_are_read(name, kind, tmp_path):
    _, texts, pairs, labels = written(name)
    task = find(name)[0]
    words = [
        task.labels[label].upper() if task.labels and row % 2 else label for row, label in enumerate(labels)
    ]
    columns = [column for column in (task.label, task.text_pair, task.text, "idx") if column]
    values = {"label": words, task.text_pair: pairs, task.text: texts, "idx": range(len(texts))}
    rows = [[values[column][row] for column in columns] for row in range(len(texts))]
    path = tmp_path / f"validation.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(dict(zip(columns, row, strict=True))) + "\n" for row in rows))
    elif kind == "csv":
        quote = [['"' + str(value).replace('"', '""') + '"' for value in row] for row in [columns, *rows]]
        path.write_text("".join(",".join(row) + "\n" for row in quote))
    else:
        path.write_text("".join("\t".join(map(str, row)) + "\n" for row in [columns, *rows]))
    table = load(name, None, path)
    assert (table.texts, table.pairs, table.labels) == (texts, pairs, labels)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("qnli", "index\tquestion\tsentence\tlabel\n0\ta\tb\tentailment\n1\ta\tentailment\n", "line 3 has 3 fields"),
        ("qnli", "index\tquestion\tsentence\tlabel\n0\ta\tb\tyes\n", "line 2: column 'label' holds 'yes', expected 0"),
        ("rte", "index\tsentence1\tsentence2\n0\ta\tb\n", "has no column 'label'. "),
        ("rte", "sentence1\tsentence2\tlabel\na\tb\t2\n", "line 2: column 'label' holds '2', expected 0 (entailment)"),
        ("mnli", "sentence1\tsentence2\tgold_label\na\tb\t-\n", "line 2: column 'gold_label' holds '-'"),
        ("mrpc", "Quality\t#1 String\n1\ta\n", "has no column '#2 String' or 'sentence2'"),
        ("mrpc", "Quality\t#1 String\t#2 String\n1\t\tb\n", "line 2: column '#1 String' holds '', expected text"),
        ("cola", "gj04\t1\t\tfine\ngj04\t1\tfine\n", "line 2 has 3 fields, expected 4 (source, label, mark, sentence)"),
        ("cola", "gj04\tx\t\tfine\n", "line 1: column 'label' holds 'x', expected 0 (unacceptable) or 1 (acceptable)"),
        ("cola", "sentence\tlabl\nfine\t1\n", "has no column 'label'. Did you mean 'labl'?"),
        ("stsb", "sentence1\tsentence2\tscore\na\tb\t5.2\n", "holds '5.2', expected a rating from 0 to 5"),
        ("stsb", "sentence1\tsentence2\tscore\na\tb\tnan\n", "holds 'nan', expected a rating"),
        ("qqp", "question1\tquestion2\tis_duplicate\na\tb\t1\na\n", "line 3 has 1 fields"),
    ],
)  # fmt: skip
def test_a_malformed_row_is_named_by_its_line(name, content, says, tmp_path):
    put(tmp_path, name, content)
    with pytest.raises(QtoolError) as caught:
        load(name, None, tmp_path)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_qqps_own_broken_training_rows_are_left_out_and_said(tmp_path):
    content = "id\tquestion1\tquestion2\tis_duplicate\n1\ta\tb\t1\n2\ta\n\tb\t0\n3\t\tb\t0\n"
    put(tmp_path, "qqp", content, "train.tsv")
    put(tmp_path, "qqp", content.replace("2\ta\n\tb\t0\n", ""))
    table = load("qqp", "train", tmp_path)
    assert (table.texts, table.labels) == (["a", ""], [1, 0])  # Quora's empty question stays
    assert table.notes[0] == "2 broken rows of train.tsv were left out"
    assert len(load("qqp", "dev", tmp_path)) == 2


def test_splits_are_known_by_glues_names_and_the_hubs(tmp_path):
    for file, rows in (("train.tsv", 4), ("dev_matched.tsv", 6), ("dev_mismatched.tsv", 8)):
        put(tmp_path, "mnli", written("mnli", rows)[0], file)
    for name, split, rows in (
        ("mnli", None, 6), ("mnli", "dev", 6), ("mnli", "validation_matched", 6), ("mnli", "dev_matched", 6),
        ("mnli", "train", 4), ("mnli-mismatched", "validation", 8), ("mnli-mismatched", "train", 4),
    ):  # fmt: skip
        assert len(load(name, split, tmp_path)) == rows
    with pytest.raises(QtoolError, match="--task mnli-mismatched"):
        load("mnli", "validation_mismatched", tmp_path)
    with pytest.raises(QtoolError, match="have no labels"):
        load("mnli", "test_matched", tmp_path)
    with pytest.raises(QtoolError, match="Did you mean 'validation'"):
        load("rte", "valdation", tmp_path)
    with pytest.raises(Unavailable, match="one file"):
        load("mnli", "train", tmp_path / "MNLI" / "train.tsv")
    with pytest.raises(QtoolError, match="has no splits"):
        load("mnli", "dev", tmp_path / "MNLI" / "train.tsv")
    with pytest.raises(QtoolError, match="there is no"):
        load("mnli", None, tmp_path / "nothing")


def test_a_glue_folder_without_a_training_split_has_no_calibration_rows(tmp_path):
    put(tmp_path, "sst2", "sentence\tlabel\na\t1\n")
    with pytest.raises(Unavailable):
        load("sst2", "train", tmp_path)


@pytest.mark.parametrize(
    ("name", "config", "split"),
    [("cola", "cola", "validation"), ("mnli", "mnli", "validation_matched"),
     ("mnli-mismatched", "mnli", "validation_mismatched"), ("stsb", "stsb", "validation")],
)  # fmt: skip
def test_the_hub_is_asked_for_its_own_names_and_gives_the_folders_table(
    name, config, split, tmp_path, monkeypatch
):
    need("datasets")
    import datasets

    content, texts, pairs, labels = written(name)
    task, asked = find(name)[0], []
    columns = {task.text: texts, task.label: labels, "idx": list(range(len(texts)))}
    columns |= {task.text_pair: pairs} if pairs else {}
    made = datasets.Dataset.from_dict(columns)
    if name == "stsb":
        made = made.cast_column("label", datasets.Value("float32"))  # as the hub has it

    def load_dataset(*arguments, split):
        asked.append((*arguments, split))
        return made

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    from_hub = load(name)
    put(tmp_path, name, content)
    from_folder = load(name, None, tmp_path)
    assert asked == [("nyu-mll/glue", config, split)]
    assert (from_hub.texts, from_hub.pairs, from_hub.labels) == (texts, pairs, from_folder.labels)
    assert load(name, "train").labels == labels
    assert asked[-1][2] == "train"


def test_a_hub_row_without_a_label_is_named(monkeypatch):
    need("datasets")
    import datasets

    rows = datasets.Dataset.from_dict({"sentence": ["a", "b"], "label": [1, -1]})
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, split: rows)
    with pytest.raises(QtoolError, match="row 1: label -1, expected 0"):
        load("cola")


def test_calibration_rows_are_read_under_glues_names_without_labels(tmp_path):
    content, texts, pairs, _ = written("mrpc", 20)
    scored = put(tmp_path, "mrpc", "\n".join(content.split("\n")[:9]) + "\n")
    rows = [line.split("\t")[3:] for line in content.split("\n")[:-1]]
    path = put(tmp_path, "mrpc", "".join("\t".join(row) + "\n" for row in rows), "texts.tsv")
    options = {"data": str(scored), "seed": 0, "limit": None, "calibration": str(path), "calibration_rows": 5}
    table, _, calibration = prepare.read_tables(options, find("mrpc")[0])
    assert len(table) == 8
    assert len(calibration) == 5
    assert not set(zip(calibration.texts, calibration.pairs, strict=True)) & set(
        zip(texts[:8], pairs[:8], strict=True)
    )


def ours(name: str, table, checkpoint: Model, logits: np.ndarray) -> dict[str, float | None]:
    """The scores as the score stage makes them from a model's own logits."""
    task = find(name)[0]
    labels, order, _ = prepare._labels_of(table, task, checkpoint)
    logits = logits[:, order]
    predicted = logits[:, 0] if logits.shape[1] == 1 else logits.argmax(axis=1)
    return {metric: metrics.compute(metric, predicted.tolist(), labels) for metric in task.metrics}


def real_or_small(name: str, tmp_path: Path):
    """The real dev table (QQP: the sample) where it is there, a small one in the same form for the others."""
    path = Path(__file__).parents[2] / "shared" / "data" / "glue" / glue.FORMS[name].folder
    path = path / ("sample4000_from_train.tsv" if name == "qqp" else "dev.tsv")
    return load(name, None, path if path.is_file() else put(tmp_path, name, written(name, 300)[0]))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", [0, 1])
def test_scores_equal_scikit_learn_and_scipy_on_the_same_logits(name, seed, tmp_path):
    need("evaluate", "sklearn", "scipy")
    from scipy.stats import pearsonr, spearmanr
    from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

    table, task = real_or_small(name, tmp_path), find(name)[0]
    rng = np.random.default_rng(seed)
    classes = class_names(name)
    # the checkpoint's own order of classes: turned round for the second seed
    own = classes[::-1] if seed else classes
    logits = rng.normal(size=(len(table), len(own))).astype(np.float32)
    if name == "stsb":
        logits = (logits + np.asarray(table.labels, np.float32)[:, None]).astype(np.float32)
        expected = {
            "pearson": pearsonr(logits[:, 0].astype(float), table.labels).statistic,
            "spearman": spearmanr(logits[:, 0].astype(float), table.labels).statistic,
        }
        assert expected["spearman"] > 0.5
    else:
        truth = [classes[label] for label in table.labels]
        logits[np.arange(len(truth)), [own.index(word) for word in truth]] += rng.uniform(0, 2, len(truth))
        said = [own[index] for index in logits.argmax(axis=1)]
        expected = {
            "accuracy": accuracy_score(truth, said),
            "matthews_correlation": matthews_corrcoef(truth, said),
            "f1": f1_score(truth, said, pos_label=classes[1]) if len(classes) == 2 else None,
        }
        assert expected["matthews_correlation"] > 0.1
    scores = ours(name, table, model(*own), logits)
    assert scores == {metric: pytest.approx(expected[metric], rel=1e-12) for metric in task.metrics}


@pytest.mark.parametrize(("name", "positive"), [("mrpc", "equivalent"), ("qqp", "duplicate")])
def test_f1_counts_the_second_class_as_positive(name, positive, tmp_path):
    need("evaluate", "sklearn")
    put(tmp_path, name, written(name, 4)[0])  # labels 0 1 0 1
    checkpoint = model(positive, f"not_{positive}")  # column 0 is the positive class
    logits = np.array([[1.0, 0], [1, 0], [0, 1], [0, 1]])  # says 1 1 0 0
    # one true positive, one false, one missed: precision and recall 1/2
    assert ours(name, load(name, None, tmp_path), checkpoint, logits) == {"f1": 0.5, "accuracy": 0.5}
    always = np.array([[0.0, 1]] * 4)
    assert ours(name, load(name, None, tmp_path), checkpoint, always)["f1"] == 0


def test_a_permuted_three_class_checkpoint_scores_the_same(tmp_path):
    need("evaluate", "sklearn")
    put(tmp_path, "mnli", written("mnli", 90)[0])
    table, classes = load("mnli", None, tmp_path), class_names("mnli")
    logits = np.random.default_rng(0).normal(size=(90, 3))
    expected = ours("mnli", table, model(*classes), logits)
    order = [2, 0, 1]
    assert ours("mnli", table, model(*(classes[i].upper() for i in order)), logits[:, order]) == expected
    assert ours("mnli", table, model("LABEL_0", "LABEL_1", "LABEL_2"), logits) == expected


@pytest.mark.parametrize(
    ("name", "classes", "says"),
    [
        ("stsb", ("LABEL_0", "LABEL_1"), "needs a model with one real-valued output (num_labels 1); this one has 2"),
        ("rte", ("LABEL_0",), "needs a model with classes; this one has a single output"),
        ("rte", ("entailment", "neutral", "contradiction"), "label 1 (not_entailment) has no class"),
        ("mrpc", ("no", "yes"), "The task's labels: not_equivalent, equivalent. The model's: no, yes"),
        ("qqp", ("duplicate", "not_duplicate", "unsure"), "f1 needs two classes; the model has 3"),
    ],
)  # fmt: skip
def test_a_head_that_does_not_fit_the_task_is_refused_in_one_line(name, classes, says, tmp_path):
    put(tmp_path, name, written(name)[0])
    with pytest.raises(QtoolError) as caught:
        prepare._labels_of(load(name, None, tmp_path), find(name)[0], model(*classes))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_class_that_the_task_lacks_is_said_and_never_right(tmp_path):
    need("evaluate", "sklearn")
    put(tmp_path, "sst2", written("sst2", 4)[0])
    table, checkpoint = load("sst2", None, tmp_path), model("neutral", "positive", "negative")
    _, order, notes = prepare._labels_of(table, find("sst2")[0], checkpoint)
    assert order == [2, 1, 0]
    assert "no class like the model's neutral" in notes[0]
    logits = np.array([[0.0, 0, 1], [0, 1, 0], [1, 0, 0], [1, 0, 0]])
    assert ours("sst2", table, checkpoint, logits) == {"accuracy": 0.5}


FLAGS = ("--recipe", "fp32", "--rounds", "1", "--threads", "1")


def tiny_glue(folder: Path, name: str, rows: int = 60) -> Path:
    """Rows of the tiny checkpoint's words in the task's own layout."""
    _, row, labels = LAYOUT[name]
    rng = np.random.default_rng(0)
    header = LAYOUT[name][0]
    lines = [header] if header else []
    for n in range(rows):
        texts = [" ".join(rng.choice(WORDS, 3 + n % 7)) for _ in range(2)]
        lines.append(row.format(*texts, n=n, label=labels[n % len(labels)]))
    return put(folder, name, "\n".join(lines).replace("|", "\t") + "\n")


@pytest.mark.slow
def test_a_regression_head_is_scored_on_stsb_by_rank(tmp_path):
    need("torch", "transformers", "scipy")
    from scipy.stats import pearsonr, spearmanr

    checkpoint = make_checkpoint(tmp_path / "model", labels=("LABEL_0",))
    tiny_glue(tmp_path / "glue", "stsb")
    run = tmp_path / "run"
    done = qtool("sweep", checkpoint, "--task", "stsb", "--data", tmp_path / "glue", *FLAGS, "--out", run)
    assert done.returncode == 0, done.stderr
    assert "the official validation split 1500" in done.stdout
    score = next(line for line in lines_of(run) if line["stage"] == "score")["values"]
    with np.load(run / score["predictions"]) as file:
        logits, labels = file["logits"][:, 0].astype(float), file["labels"]
    assert labels.tolist() == [[0.0, 3.8, 5.0][n % 3] for n in range(60)]
    assert score["metrics"]["spearman"] == pytest.approx(spearmanr(logits, labels).statistic, rel=1e-9)
    assert score["metrics"]["pearson"] == pytest.approx(pearsonr(logits, labels).statistic, rel=1e-6)


@pytest.mark.slow
def test_fine_tuning_writes_a_named_checkpoint_and_prints_its_dev_score(tmp_path):
    need("torch", "transformers", "sklearn")
    import torch
    from sklearn.metrics import f1_score
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    base = make_checkpoint(tmp_path / "base")
    tiny_glue(tmp_path / "glue", "mrpc")
    put(tmp_path / "glue", "mrpc", (tmp_path / "glue/MRPC/dev.tsv").read_text(), "train.tsv")
    script = Path(__file__).parents[1] / "benchmarks" / "finetune.py"
    outputs = []
    for folder in ("one", "two"):
        done = subprocess.run(
            [sys.executable, script, "mrpc", tmp_path / folder, "--base", base, "--data", tmp_path / "glue",
             "--epochs", "1", "--seed", "3"],
            capture_output=True, text=True, timeout=280, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        outputs.append((tmp_path / folder / "model.safetensors").read_bytes())
    assert outputs[0] == outputs[1]  # the seed decides everything
    made = AutoModelForSequenceClassification.from_pretrained(tmp_path / "one").eval()
    assert made.config.id2label == {0: "not_equivalent", 1: "equivalent"}
    table = load("mrpc", None, tmp_path / "glue")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "one")
    with torch.inference_mode():
        batch = tokenizer(table.texts, table.pairs, padding=True, truncation=True, return_tensors="pt")
        said = made(**batch).logits.argmax(-1)
    scores = json.loads(done.stdout.strip().splitlines()[-1])
    assert scores["f1"] == pytest.approx(f1_score(table.labels, said))
    assert scores["seed"] == 3
