"""Train the demo model (or its draft) by a schedule; restarts from its checkpoint.

    python train.py --run runs/main --model-folder ../../src/tokenmill/demo/model
    python train.py --run runs/more --init ../../src/tokenmill/demo/model --schedule schedule_more.toml ...
    python train.py --run runs/draft --shape draft --schedule schedule_draft.toml ...

A run folder holds ``state.safetensors`` (float32 masters and moments), ``state.json`` (where it stands) and
``log.jsonl``. Everything is drawn from the schedule's seed, the phase and the pool number.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

try:
    import torch
except ModuleNotFoundError:
    raise SystemExit("training needs torch and safetensors: pip install 'tokenmill[torch]' safetensors") from None
from data import Encoder, pool_batches
from optimizer import MasterOptimizer
from quick_eval import accuracies, heldout_rows
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import load_file, save_file
from schedule import Phase, Schedule, read_schedule
from tokenizers import Tokenizer

from model import DRAFT_SHAPE, MAIN_SHAPE, DemoModel, ModelShape

HERE = Path(__file__).parent
SHAPES = {"main": MAIN_SHAPE, "draft": DRAFT_SHAPE}


EMBEDDING = "model.embed_tokens.weight"


def moved_rows(rows: torch.Tensor, old: Tokenizer, new: Tokenizer) -> torch.Tensor:
    """The embedding ``[new vocabulary, hidden]`` from that of another tokenizer, ``rows`` ``[old vocabulary, hidden]``.

    A token that both have keeps its row; another begins as the mean of the old tokens that spell it.
    """
    moved = rows.mean(0).repeat(new.get_vocab_size(), 1)
    ids = old.get_vocab()
    for token, index in new.get_vocab().items():
        pieces = [ids[token]] if token in ids else old.encode(new.decode([index], skip_special_tokens=False)).ids
        if pieces:
            moved[index] = rows[pieces].mean(0)
    return moved


@dataclass
class Place:
    """The place of a run in its schedule: phase, step inside it, pool and batch inside the pool."""

    phase: int = 0
    step: int = 0
    pool: int = 0
    batch: int = 0
    tokens: int = 0


class Run:
    """One training run in a folder."""

    def __init__(self, folder: Path, shape: ModelShape, encoder: Encoder, schedule: Path) -> None:
        self.folder, self.encoder, self.schedule_path, self.place = folder, encoder, schedule, Place()
        self.schedule: Schedule = read_schedule(schedule)
        torch.manual_seed(self.schedule.seed)
        self.model = DemoModel(shape).to(torch.bfloat16)
        self.optimizer = MasterOptimizer(self.model)
        self.heldout = heldout_rows(encoder, 60)
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / "state.json").exists():
            self._load()

    def _load(self) -> None:
        state = json.loads((self.folder / "state.json").read_text())
        self.place = Place(**state["place"])
        self.optimizer.load(load_file(self.folder / "state.safetensors"), state["updates"])
        if self.place.phase < len(self.schedule.phases):
            done = self.place.step >= self.schedule.phases[self.place.phase].steps
            if done:
                self._next_phase()

    def start_from(self, folder: Path) -> None:
        """Begin a new run from exported weights (the optimizer's moments start at zero)."""
        weights = load_file(folder / "model.safetensors")
        other = Tokenizer.from_file(str(folder / "tokenizer.json"))
        weights[EMBEDDING] = moved_rows(weights[EMBEDDING].float(), other, self.encoder.tokenizer)
        for name, master in self.optimizer.master.items():
            master.copy_(weights[name])
            self.optimizer.parameters[name].data.copy_(master)

    def save(self) -> None:
        """Write the checkpoint; a crash in between leaves the old one."""
        save_file(self.optimizer.state(), self.folder / "state.tmp")
        state = {"place": asdict(self.place), "updates": self.optimizer.steps, "shape": self.model.shape.to_json()}
        (self.folder / "state.json.tmp").write_text(json.dumps(state, indent=2) + "\n")
        (self.folder / "state.tmp").replace(self.folder / "state.safetensors")
        (self.folder / "state.json.tmp").replace(self.folder / "state.json")

    def log(self, **entry: object) -> None:
        """Append one line to the log."""
        with (self.folder / "log.jsonl").open("a") as file:
            file.write(json.dumps({**asdict(self.place), **entry}) + "\n")

    def _next_phase(self) -> None:
        self.place = Place(phase=self.place.phase + 1, tokens=self.place.tokens)

    def train(self, save_every: int, evaluate_every: int) -> None:
        """Run all phases that are left."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, refresh_per_second=0.2) as progress:
            bar = progress.add_task("training", total=self.schedule.total_steps, completed=self.optimizer.steps)
            while self.place.phase < len(self.schedule.phases):
                progress.update(bar, total=self.schedule.total_steps)
                for loss, speed in self._phase(self.schedule.phases[self.place.phase]):
                    step = self.optimizer.steps
                    progress.update(bar, completed=step, description=f"loss {loss:.3f} {speed:.0f} tokens/s")
                    if step % evaluate_every == 0:
                        self.report(loss, speed)
                    if step % save_every == 0:
                        self.save()
                self.save()
                self._next_phase()
                self.schedule = read_schedule(self.schedule_path)  # later phases may have been added or changed
        self.report(0.0, 0.0)

    def report(self, loss: float, speed: float) -> None:
        """Log loss, speed and held-out accuracy by skill."""
        scores = accuracies(self.model, self.heldout, self.encoder.pad)
        self.log(updates=self.optimizer.steps, loss=round(loss, 4), speed=round(speed), accuracy=scores)

    def _phase(self, phase: Phase):
        place, average = self.place, None
        while place.step < phase.steps:
            seed = f"{self.schedule.seed}-{place.phase}-{place.pool}"
            skip = place.batch
            for number, (ids, mask) in enumerate(pool_batches(self.encoder, phase.mix, seed, phase.batch_tokens)):
                if number < skip:
                    continue
                began = time.perf_counter()
                loss = self.model.loss(torch.from_numpy(ids), torch.from_numpy(mask))
                loss.backward()
                self.optimizer.step(phase.rate_at(place.step))
                place.step, place.batch, place.tokens = place.step + 1, number + 1, place.tokens + ids.size
                value = loss.item()
                average = value if average is None else 0.95 * average + 0.05 * value
                yield average, ids.size / (time.perf_counter() - began)
                if place.step >= phase.steps:
                    return
            place.pool, place.batch = place.pool + 1, 0


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description="Train the demo model")
    parser.add_argument("--run", type=Path, required=True, help="folder of the run; an existing one is resumed")
    parser.add_argument("--model-folder", type=Path, required=True, help="folder with tokenizer.json")
    parser.add_argument("--shape", choices=SHAPES, default="main")
    parser.add_argument("--schedule", type=Path, default=HERE / "schedule.toml")
    parser.add_argument("--init", type=Path, help="begin a new run from the weights in this exported folder")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-compile", action="store_true", help="run the model without torch.compile")
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--evaluate-every", type=int, default=200)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    encoder = Encoder(arguments.model_folder)
    run = Run(arguments.run, SHAPES[arguments.shape], encoder, arguments.schedule)
    if arguments.init is not None and not run.optimizer.steps:
        run.start_from(arguments.init)
    if not arguments.no_compile:
        run.model.compile()
    run.train(arguments.save_every, arguments.evaluate_every)


if __name__ == "__main__":
    main()
