"""What all tasks have in common: streams that resume exactly and are shared by ranks, documents, words, figures."""

import json
from itertools import islice

import pytest
import torch

from looplm.data.corpus import open_rows
from looplm.data.packing import IGNORE_INDEX
from looplm.data.recipe import DataRecipe, GeneratorSource
from looplm.errors import UserError
from looplm.hf.modeling import LoopLMForCausalLM
from looplm.lab import fold, mano, multihop, reachability_task
from looplm.lab.fold import FoldTask
from looplm.lab.fold_recipe import fold_config
from looplm.lab.mano import ManoTask
from looplm.lab.multihop import MultihopTask
from looplm.lab.reachability_task import ReachabilityTask
from looplm.lab.task import TaskDocuments, TaskStream, task_tokenizer
from looplm.training.rows import LoadedRows

MULTIHOP = {"num_pairs": 40, "num_entities": 30, "num_relations": 3, "num_layers": 3, "max_hops": 2}
MODULES = [
    (fold, {"max_k": 3}, FoldTask(3)),
    (mano, {"modulus": 5, "max_length": 3}, ManoTask(5, 3)),
    (multihop, MULTIHOP, MultihopTask(**MULTIHOP)),
    (reachability_task, {"num_vertices": 6}, ReachabilityTask(6)),
]
TASKS = [task for _, _, task in MODULES]


def named(value: object) -> str | None:
    return value.name if hasattr(value, "name") else None


@pytest.fixture(params=TASKS, ids=named)
def task(request):
    return request.param


def test_a_batch_is_documents_filled_up_with_the_last_word_and_labels_the_answer_alone(task):
    batch = next(TaskStream(task, 200, seed=0))
    filler = len(task.words) - 1
    assert {name: tuple(rows.shape) for name, rows in batch.items()} == dict.fromkeys(
        ("input_ids", "labels", "document_ids"), (200, task.max_len)
    )
    assert all(rows.dtype == torch.int64 for rows in batch.values())
    assert not batch["document_ids"].any()
    longest = 0
    for ids, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
        length = len([token for token in ids if token != filler])
        assert ids[length:] == [filler] * (task.max_len - length)
        assert labels == [IGNORE_INDEX] * (length - 1) + [ids[length - 1]] + [IGNORE_INDEX] * (task.max_len - length)
        longest = max(longest, length)
    assert longest == task.max_len


def test_a_stream_resumed_in_the_middle_draws_what_would_have_come(task):
    straight = [batch["input_ids"] for batch in islice(TaskStream(task, 8, seed=2), 6)]
    stream = TaskStream(task, 8, seed=2)
    for _ in range(3):
        next(stream)
    state = json.loads(json.dumps(stream.state_dict()))
    resumed = TaskStream(task, 8, seed=2)
    resumed.load_state_dict(state)
    for ours, theirs in zip(straight[3:], resumed, strict=False):
        assert torch.equal(ours, theirs["input_ids"])
    assert not torch.equal(straight[0], straight[1])
    assert not torch.equal(straight[0], next(TaskStream(task, 8, seed=3))["input_ids"])


def test_documents_resumed_anywhere_are_what_would_have_come(task):
    straight = list(islice(TaskDocuments(task, seed=1), 530))
    for position in (0, 1, 255, 256, 300):
        documents = TaskDocuments(task, seed=1)
        assert list(islice(documents, position)) == straight[:position]
        state = json.loads(json.dumps(documents.state_dict()))
        resumed = TaskDocuments(task, seed=1)
        next(resumed)
        resumed.load_state_dict(state)
        assert list(islice(resumed, 530 - position)) == straight[position:]


def test_documents_end_with_their_answer(task):
    for document in islice(TaskDocuments(task, seed=0), 100):
        ids, labels = document["input_ids"], document["labels"]
        assert labels == [IGNORE_INDEX] * (len(ids) - 1) + [ids[-1]]
        assert len(task.words) - 1 not in ids


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_see_together_what_one_sees(world_size):
    whole = next(TaskStream(FoldTask(), 8, seed=0))
    parts = [TaskStream(FoldTask(), 8, 0, rank, world_size).take(8 // world_size) for rank in range(world_size)]
    for name, rows in whole.items():
        assert torch.equal(torch.stack([part[name] for part in parts], dim=1).flatten(0, 1), rows)


def test_a_trainer_takes_whole_batches():
    stream, same = (TaskStream(FoldTask(max_k=2), batch_size=8, seed=2) for _ in range(2))
    assert torch.equal(stream.take(8)["input_ids"], next(same)["input_ids"])
    with pytest.raises(UserError, match="8 documents at a time, and 4 are wanted"):
        stream.take(4)
    with pytest.raises(UserError, match="shared by 3 ranks"):
        TaskStream(FoldTask(), 8, 0, 0, 3)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (TaskStream(FoldTask(max_k=3), 8, 2), r"max_k=4, seed=0\) and is FoldTask\(max_k=3"),
        (TaskStream(FoldTask(seed=1), 8, 2), r"and is FoldTask\(max_k=4, seed=1"),
        (TaskStream(ManoTask(), 8, 2), "mano stream cannot"),
        (TaskStream(FoldTask(), 9, 2), "batch_size was 8 and is 9"),
        (TaskStream(FoldTask(), 8, 3), "seed was 2 and is 3"),
    ],
)
def test_a_state_of_another_stream_is_refused(other, said):
    with pytest.raises(UserError, match=said):
        other.load_state_dict(TaskStream(FoldTask(), 8, 2).state_dict())


def test_a_state_of_other_documents_is_refused():
    with pytest.raises(UserError, match="seed was 2 and is 3"):
        TaskDocuments(FoldTask(), 3).load_state_dict(TaskDocuments(FoldTask(), 2).state_dict())


@pytest.mark.parametrize("wrong", [lambda: TaskStream(FoldTask(), 0, 0), lambda: TaskStream(FoldTask(), 1, -1)])
def test_values_out_of_range_are_refused(wrong):
    with pytest.raises(UserError):
        wrong()


def test_the_tokenizer_reads_and_writes_the_words(task, tmp_path):
    tokenizer = task_tokenizer(task)
    assert len(tokenizer) == len(task.words) == len(set(task.words))
    row = task.questions(task.levels[-1], 1, seed=0)[0].tolist()
    text = tokenizer.decode(row)
    assert text == " ".join(task.words[token] for token in row)
    assert tokenizer(text)["input_ids"] == row
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == len(task.words) - 1
    tokenizer.save_pretrained(tmp_path)
    assert type(tokenizer).from_pretrained(tmp_path)(text)["input_ids"] == row


@pytest.mark.parametrize(("module", "fields", "task"), MODULES, ids=named)
def test_a_recipe_reads_a_task_by_the_names_of_its_module_and_goes_on_where_it_was_left(
    module, fields, task, tmp_path
):
    source = GeneratorSource(
        kind="generator", format="tokens", function=f"{module.__name__}:documents", arguments={**fields, "seed": 3}
    )

    def open_again() -> LoadedRows:
        return LoadedRows(
            open_rows(
                DataRecipe(sources=[source], packing="whole", stream_block_tokens=200), module.tokenizer(**fields),
                seq_len=task.max_len, seed=0, cache_dir=tmp_path, vocab_size=len(task.words),
            )
        )  # fmt: skip

    rows = open_again()
    drawn = TaskDocuments(type(task)(**fields, seed=3), seed=3)
    written = {tuple(document["input_ids"]) for document in islice(drawn, 1000)}
    batch = rows.take(40)
    for ids, labels, document_ids in zip(*batch.values(), strict=True):
        predicted = labels != IGNORE_INDEX
        assert torch.equal(labels[predicted], ids[predicted])
        for document in document_ids.unique():
            place = document_ids == document
            assert tuple(ids[place].tolist()) in written or not predicted[place].any()
    resumed = open_again()
    resumed.load_state_dict(json.loads(json.dumps(rows.state_dict())))
    assert torch.equal(resumed.take(30)["input_ids"], rows.take(30)["input_ids"])


@pytest.mark.parametrize(("module", "fields", "task"), MODULES, ids=named)
def test_figures_of_an_untrained_model_are_those_of_chance(module, fields, task):
    torch.manual_seed(0)
    config = fold_config(FoldTask(max_k=task.max_len), num_loops=2)
    config.vocab_size = len(task.words)
    found = module.measure(LoopLMForCausalLM(config).eval(), **fields)
    assert found["levels"] == list(task.levels)
    assert len(found["accuracy_by_level"]) == len(found["expected_loops_by_level"]) == len(task.levels)
    assert found["accuracy_by_loop"] == found["accuracy_by_level_and_loop"][-1]
    assert found["accuracy"] == found["accuracy_by_level"][-1] == found["accuracy_by_loop"][1] < 0.6
    assert len(found["accuracy_by_loop"]) == 4  # two beyond the trained two
    assert -1 <= found["depth_correlation"] <= 1
    json.dumps(found, allow_nan=False)
