"""Train an EAGLE-3 head for a model, from nothing but the model.

    python -m examples.train_eagle --model smollm2 --out runs/smollm2

Writes text, hidden states, checkpoints and the head into one folder, stage by stage; what is there is kept, so that
the same command goes on where it was stopped. The last line of log.jsonl is the result.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from examples.train_eagle.batches import Vocabulary
from examples.train_eagle.beginning import begin
from examples.train_eagle.dialogues import read, write
from examples.train_eagle.export import read_checkpoint, write_checkpoint
from examples.train_eagle.features import Features, write_features
from examples.train_eagle.head import EagleHead, HeadShape
from examples.train_eagle.judge import judge
from examples.train_eagle.teacher import Teacher
from examples.train_eagle.text import Lengths, Writer, held_out_turns, write_until
from examples.train_eagle.training import Plan, Trainer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from tokenmill import LLM

TEMPERATURES = (0.0, 0.7)


class Run:
    """One run in a folder, and its log."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.folder = arguments, arguments.out
        self.folder.mkdir(parents=True, exist_ok=True)

    def log(self, **entry: object) -> None:
        """Append a line to the log."""
        with (self.folder / "log.jsonl").open("a") as file:
            file.write(json.dumps(entry) + "\n")

    @contextmanager
    def stage(self, name: str, total: int) -> Iterator[tuple[Progress, TaskID]]:
        """Show a bar for a stage, and log how long it took."""
        began, used = time.perf_counter(), os.times()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, refresh_per_second=1) as progress:
            yield progress, progress.add_task(name, total=total)
        now = os.times()
        cpu = now.user + now.system - used.user - used.system
        self.log(stage=name, seconds=round(time.perf_counter() - began, 1), cpu_seconds=round(cpu, 1))

    def write_text(self) -> None:
        """Let the model write what the head learns from, and answer the held-out turns."""
        own, lengths = self.arguments, self._lengths()
        held_out = [self.folder / f"held_out/{temperature}.jsonl" for temperature in TEMPERATURES]
        if all(path.exists() for path in held_out) and self._num_answer_tokens() >= own.tokens:
            return
        with LLM(own.model, max_num_seqs=own.streams, max_model_len=lengths.dialogue) as llm:
            writer = Writer(llm, lengths, own.seed)
            for path, temperature in zip(held_out, TEMPERATURES, strict=True):
                if not path.exists():
                    write(path, writer.answer_turns(held_out_turns()[: own.held_out], temperature))
            with self.stage("text: tokens of answers", own.tokens) as (progress, bar):
                for done in write_until(writer, self.folder / "text", own.tokens):
                    progress.update(bar, completed=min(done, own.tokens))

    def _lengths(self) -> Lengths:
        own = self.arguments
        return Lengths(own.streams, own.answer_tokens, own.dialogue_tokens)

    def _num_answer_tokens(self) -> int:
        return sum(dialogue.num_answer_tokens for path in self._texts() for dialogue in read(path))

    def _texts(self) -> list[Path]:
        return sorted((self.folder / "text").glob("*.jsonl"))

    def write_features(self, teacher: Teacher) -> None:
        """Keep the hidden states of all text."""
        files = [*self._texts(), *sorted((self.folder / "held_out").glob("*.jsonl"))]
        left = [path for path in files if not path.with_suffix(".safetensors").exists()]
        if left:
            with self.stage("hidden states: files", len(files)) as (progress, bar):
                progress.update(bar, completed=len(files) - len(left))
                for path in left:
                    write_features(teacher, path, path.with_suffix(".safetensors"))
                    progress.advance(bar)

    def train(self, teacher: Teacher) -> None:
        """Train the head and write its checkpoint."""
        own = self.arguments
        features = Features([path.with_suffix(".safetensors") for path in self._texts()])
        tokens, vocab_size = features.answer_tokens(), teacher.config.vocab_size
        vocabulary = Vocabulary.most_frequent(tokens, min(own.draft_vocab_size, vocab_size), vocab_size)
        wanted = teacher.head[vocabulary.ids]
        torch.manual_seed(own.seed)
        head = EagleHead(shape_of(teacher.config, own.intermediate_size, len(vocabulary.ids)))
        plan = Plan(own.depths, epochs=own.epochs, batch_tokens=own.batch_tokens, rate=own.rate, seed=own.seed)
        trainer = Trainer(head, teacher.embedding, wanted, plan, self.folder / "state.safetensors")
        if not trainer.step:
            begin(head, features, teacher.embedding, teacher.norm, wanted)
        total = trainer.num_steps(features)
        self.log(answer_tokens=len(tokens), coverage=round(vocabulary.coverage(tokens), 4), steps=total)
        with self.stage("training: steps", total) as (progress, bar):
            average = None
            for loss in trainer.train(features, vocabulary, total):
                average = loss if average is None else 0.95 * average + 0.05 * loss
                progress.update(bar, completed=trainer.step, description=f"training: loss {average:.3f}, steps")
                if trainer.step % own.save_every == 0 or trainer.step == total:
                    # First what is judged: a run that is stopped in between takes these steps again.
                    self._export(head, vocabulary, teacher)
                    trainer.save()
                    self.log(step=trainer.step, loss=round(average, 4), greedy=self._judge(teacher, 0.0, 8))

    def _export(self, head: EagleHead, vocabulary: Vocabulary, teacher: Teacher) -> None:
        write_checkpoint(self.folder / "head", head, vocabulary, teacher.config.to_dict(), teacher.boundaries)

    def _judge(self, teacher: Teacher, temperature: float, count: int | None = None) -> dict[str, Any]:
        head, vocabulary = read_checkpoint(self.folder / "head")
        features = Features([self.folder / f"held_out/{temperature}.safetensors"])
        rows = (features[index] for index in range(min(count or len(features), len(features))))
        verdict = judge(head, vocabulary, teacher.embedding, rows, self.arguments.drafts)
        return {
            "acceptance": verdict.acceptance,
            "tokens_a_step": verdict.tokens_a_step,
            "tokens": verdict.tokens,
        }

    def report(self, teacher: Teacher) -> dict[str, Any]:
        """Judge the head that was written on all held-out chats; log and return the result."""
        size = (self.folder / "head" / "model.safetensors").stat().st_size
        with self.stage("judging: temperatures", len(TEMPERATURES)) as (progress, bar):
            result: dict[str, Any] = {"drafts": self.arguments.drafts, "bytes": size}
            for temperature in TEMPERATURES:
                result[f"at_temperature_{temperature}"] = self._judge(teacher, temperature)
                progress.advance(bar)
        self.log(**result)
        return result


def shape_of(config: Any, intermediate_size: int, draft_vocab_size: int) -> HeadShape:
    """Return the shape of a head for the model with this configuration of transformers'."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return HeadShape(
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        intermediate_size=intermediate_size,
        draft_vocab_size=draft_vocab_size,
        rope_theta=config.rope_parameters["rope_theta"],
        rms_eps=config.rms_norm_eps,
    )


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(prog="python -m examples.train_eagle", description="Train an EAGLE-3 head")
    parser.add_argument("--model", default="smollm2", help="a folder, a .gguf file or a name of the catalogue")
    parser.add_argument(
        "--out", type=Path, required=True, help="folder of the run; one that is there is taken up again"
    )
    parser.add_argument("--tokens", type=int, default=400_000, help="tokens of answers to write")
    parser.add_argument("--streams", type=int, default=64, help="dialogues that are written side by side")
    parser.add_argument("--answer-tokens", type=int, default=256, help="tokens of an answer at most")
    parser.add_argument("--dialogue-tokens", type=int, default=640, help="tokens of a dialogue at most")
    parser.add_argument("--draft-vocab-size", type=int, default=3072, help="tokens that can be drafted")
    parser.add_argument("--intermediate-size", type=int, default=768, help="width of the head's feed-forward block")
    parser.add_argument("--depths", type=int, default=4, help="drafts in a row that are trained")
    parser.add_argument("--drafts", type=int, default=4, help="drafts in a row that are judged")
    parser.add_argument("--held-out", type=int, help="chats of held_out.txt that are judged; all if left out")
    parser.add_argument("--epochs", type=float, default=4.0)
    parser.add_argument("--batch-tokens", type=int, default=2048, help="tokens of a step, padding included")
    parser.add_argument("--rate", type=float, default=3e-4, help="learning rate at its peak")
    parser.add_argument("--save-every", type=int, default=50, help="steps from checkpoint to checkpoint")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    return parser


def main(words: list[str] | None = None) -> dict[str, Any]:
    """Run all stages that are left, and return the result."""
    arguments = make_parser().parse_args(words)
    torch.set_num_threads(arguments.threads)
    run = Run(arguments)
    run.write_text()
    teacher = Teacher(arguments.model)
    run.write_features(teacher)
    run.train(teacher)
    result = run.report(teacher)
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
