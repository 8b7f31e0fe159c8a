"""Labels are matched with a checkpoint's classes by meaning, and a permuted mapping is suspected from the scores."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from qtool.core import QtoolError
from qtool.tasks import _labels, find
from tests.conftest import need

NLI = ["entailment", "neutral", "contradiction"]


def test_words_match_the_models_classes_whatever_their_case_and_order():
    mapped, notes = _labels.match(["negative", "Positive"], None, {0: "POSITIVE", 1: "NEGATIVE"})
    assert (mapped, notes) == ([1, 0], [])


def test_numbers_go_through_the_tasks_names_to_a_permuted_model():
    mapped, _ = _labels.match(["0", "1", "1"], ["negative", "positive"], {0: "positive", 1: "negative"})
    assert mapped == [1, 0, 0]


def test_a_model_without_class_names_is_taken_in_the_documented_order_and_it_is_said():
    mapped, notes = _labels.match(["0", "1"], ["negative", "positive"], {0: "LABEL_0", 1: "LABEL_1"})
    assert mapped == [0, 1]
    assert "documented order was taken (0=negative, 1=positive)" in notes[0]


def test_a_tables_own_numbers_are_class_numbers_and_it_is_said():
    mapped, notes = _labels.match(["0", "1", "0"], None, {0: "negative", 1: "positive"})
    assert mapped == [0, 1, 0]
    assert "(0=negative, 1=positive)" in notes[0]


def test_ratings_from_one_are_not_class_numbers():
    with pytest.raises(QtoolError, match="has no class in the model"):
        _labels.match(
            ["1", "2", "4"], None, dict(enumerate(["1 star", "2 stars", "3 stars", "4 stars", "5 stars"]))
        )


@pytest.mark.parametrize("label", ["2", 7, "neutral", -1])
def test_a_label_without_a_class_shows_both_lists(label):
    with pytest.raises(QtoolError) as caught:
        _labels.match(["0", label], ["negative", "positive"], {0: "neg", 1: "pos"})
    assert "negative, positive" in str(caught.value)
    assert "neg, pos" in str(caught.value)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_an_mnli_checkpoint_may_have_its_classes_in_any_order(order):
    id2label = {index: NLI[place].upper() for index, place in enumerate(order)}
    mapped, notes = _labels.match([0, 1, 2], NLI, id2label)
    assert [NLI[place] for place in order] == [NLI[mapped.index(index)] for index in range(3)]
    assert notes == []


@pytest.mark.parametrize(
    ("task", "names"),
    [
        ("sst2", ("NEG", "POS")),
        ("sst2", ("Negative", "Positive")),
        ("mrpc", ("not equivalent", "Equivalent")),
        ("mrpc", ("not-paraphrase", "paraphrase")),
        ("cola", ("Unacceptable", "acceptable")),
        ("cola", ("not_acceptable", "acceptable")),
        ("cola", ("ungrammatical", "grammatical")),
        ("rte", ("entailment", "not entailment")),
        ("rte", ("ENTAILMENT", "NOT-ENTAILMENT")),
        ("qnli", ("entailment", "non_entailment")),
        ("wnli", ("not_entailment", "entailment")),
        ("qqp", ("not_duplicate", "duplicate")),
        ("qqp", ("NOT DUPLICATE", "is duplicate")),
        ("mnli", ("entail", "Neutral", "contradict")),
    ],
)
def test_common_spellings_mean_the_tasks_classes_in_either_order(task, names):
    documented = find(task)[0].labels
    numbers = list(range(len(names)))
    assert _labels.match(numbers, documented, dict(enumerate(names))) == (numbers, [])
    turned = dict(enumerate(names[::-1]))
    assert _labels.match(numbers, documented, turned) == (numbers[::-1], [])


@pytest.mark.parametrize(
    ("task", "names"),
    [
        ("mrpc", ("no", "yes")),
        ("mrpc", ("False", "True")),
        ("cola", ("bad", "good")),
        ("sst2", ("negative", "neutral")),
        ("rte", ("contradiction", "entailment")),
        ("rte", ("entailment", "neutral", "contradiction")),
        ("mnli", ("entailment", "not_entailment")),
        ("mnli", ("LABEL_0", "LABEL_1")),
        ("sst2", ("1 star", "5 stars")),
        ("sst2", ("neg", "NEG", "positive")),
        ("sst2", ("LABEL_1", "LABEL_2")),
    ],
)
def test_what_does_not_mean_the_tasks_classes_is_refused_with_both_lists(task, names):
    documented = find(task)[0].labels
    with pytest.raises(QtoolError) as caught:
        _labels.match(list(range(len(documented))), documented, dict(enumerate(names)))
    assert ", ".join(documented) in str(caught.value)
    assert ", ".join(names) in str(caught.value)


@pytest.mark.parametrize("style", ["LABEL_{}", "label{}", "Class {}", "{}"])
def test_names_that_are_numbers_are_class_numbers_and_it_is_said(style):
    id2label = {index: style.format(number) for index, number in enumerate((2, 0, 1))}
    mapped, notes = _labels.match([0, 1, 2], NLI, id2label)
    assert mapped == [1, 2, 0]  # the number is in the name, not in the place
    assert "documented order was taken (0=entailment, 1=neutral, 2=contradiction)" in notes[0]


def test_words_of_a_table_meet_a_model_without_names_in_the_documented_order():
    mapped, notes = _labels.match(
        ["not_entailment", "entailment"], ["entailment", "not_entailment"], {0: "LABEL_0", 1: "LABEL_1"}
    )
    assert mapped == [1, 0]
    assert len(notes) == 1


def test_an_exact_name_goes_before_a_synonym():
    assert _labels.match(["neg", "negative"], None, {0: "neg", 1: "negative"})[0] == [0, 1]


@pytest.mark.parametrize(
    ("written", "number"),
    [("1", 1), (" 0 ", 0), ("1.0", 1), (2.0, 2), (True, 1), ("1.5", None), (1.5, None), ("-1", None), ("a", None),
     ("\u0661", None), (float("nan"), None), (None, None)],
)  # fmt: skip
def test_a_whole_number_is_read_in_its_usual_forms(written, number):
    assert _labels.number_of(written) == number


def answers(labels, wrong_every, classes, seed=0):
    """Logits whose argmax is the label, but for every n-th row, where it is the next class."""
    said = np.where(np.arange(len(labels)) % wrong_every == 0, (labels + 1) % classes, labels)
    logits = np.random.default_rng(seed).uniform(-1, 0, (len(labels), classes))
    logits[np.arange(len(labels)), said] = 1
    return logits


def test_a_right_mapping_is_not_suspected():
    need("scipy")
    labels = np.arange(300) % 3
    assert _labels.permutation_suspicion(answers(labels, 5, 3), labels, NLI) is None


def test_two_swapped_classes_are_suspected_with_both_accuracies():
    need("scipy")
    labels = np.arange(200) % 2
    said = _labels.permutation_suspicion(answers(labels, 10, 2)[:, ::-1], labels, ["bad", "good"])
    # one in ten is wrong: right as mapped 20 of 200, right if swapped 180 of 200
    assert "accuracy is 0.100 as mapped and would be 0.900" in said
    assert "what is read as bad, good meant good, bad" in said


def test_a_cycle_of_three_classes_is_suspected_and_undone():
    need("scipy")
    labels = np.arange(300) % 3
    # column i of the permuted model holds class (i + 1) % 3, so what is read as class i means the next one
    said = _labels.permutation_suspicion(np.roll(answers(labels, 5, 3), -1, axis=1), labels, NLI)
    assert "would be 0.800" in said
    assert "entailment, neutral, contradiction meant neutral, contradiction, entailment" in said


def test_the_best_assignment_is_the_best_of_all_permutations():
    need("scipy")
    rng = np.random.default_rng(1)
    for _ in range(20):
        labels = rng.integers(0, 4, 400)
        logits = answers(labels, 4, 4)[:, rng.permutation(4)]
        said = logits.argmax(axis=1)
        best = max(np.mean(np.array(order)[said] == labels) for order in itertools.permutations(range(4)))
        note = _labels.permutation_suspicion(logits, labels, list("abcd"))
        if best - np.mean(said == labels) > 0.2:
            assert f"would be {best:.3f}" in note
        else:
            assert note is None


def test_chance_and_one_constant_answer_are_not_suspected():
    need("scipy")
    rng = np.random.default_rng(2)
    labels = rng.integers(0, 2, 1000)
    assert _labels.permutation_suspicion(rng.normal(size=(1000, 2)), labels, ["a", "b"]) is None
    rare = (np.arange(1000) % 4 == 0).astype(int)  # always answering 1 is right on a quarter, 0 on the rest
    constant = np.tile([0.0, 1.0], (1000, 1))
    assert _labels.permutation_suspicion(constant, rare, ["a", "b"]) is None


@pytest.mark.parametrize(("rows", "suspected"), [(7, False), (8, True)])
def test_the_least_number_of_rows_follows_from_the_binomial_test(rows, suspected):
    need("scipy")
    # all wrong as mapped and all right if swapped: p = 2 assignments / 2^rows, 0.0156 at 7 rows, 0.0078 at 8
    labels = np.arange(rows) % 2
    note = _labels.permutation_suspicion(np.eye(2)[1 - labels], labels, ["a", "b"])
    assert (note is not None) == suspected


def test_a_class_the_task_lacks_and_odd_logits_do_no_harm():
    need("scipy")
    labels = np.arange(60) % 2
    logits = answers(labels, 10, 3)[:, [1, 0, 2]]
    assert "class 2" not in _labels.permutation_suspicion(logits, labels, ["negative", "positive"])
    assert _labels.permutation_suspicion(np.full((60, 2), np.nan), labels, ["a", "b"]) is None
    assert _labels.permutation_suspicion(np.zeros((60, 1)), labels, ["a"]) is None
    assert _labels.permutation_suspicion(np.zeros((0, 2)), labels[:0], ["a", "b"]) is None


def test_a_part_of_a_table_takes_its_numbers_as_the_whole_does():
    classes = {0: "bad", 1: "good"}
    assert _labels.match([1, 1], None, classes, kinds=[1, 0])[0] == [1, 1]
    with pytest.raises(QtoolError, match="label 1 has no class"):
        _labels.match([1, 1], None, classes, kinds=[1, 2])
