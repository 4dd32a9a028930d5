"""Records to Weights & Biases, if that package is installed. Floor 2.

wandb finds its key by itself; nothing here reads, prints or stores it. Its errors are told by their class alone, since
their text is not ours to vouch for; wandb prints its own explanation.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_parm.observe.json_lines import plain
from megatron_parm.observe.records import Record, StartRecord, TrainRecord, ValidRecord
from megatron_parm.observe.tensorboard_sink import TensorBoardTags, train_scalars, valid_scalars


class WandbError(RuntimeError):
    """wandb failed; the class of its error, without its text."""


@contextmanager
def _only_the_class() -> Iterator[None]:
    """Turn an error of wandb, whatever its class, into one that names the class and nothing else."""
    try:
        yield
    except Exception as error:
        raise WandbError(f"{type(error).__name__} from wandb, see its own message") from None


class WandbSink:
    """One wandb run in `project`; the same tags as TensorBoard, by iteration. Without `name` wandb finds one."""

    def __init__(
        self,
        project: str,
        folder: Path | str,
        *,
        name: str | None = None,
        entity: str | None = None,
        tags: TensorBoardTags | None = None,
        interval: int = 1,
    ) -> None:
        try:
            import wandb
        except ImportError as error:
            raise WandbError("--wandb-project needs the package wandb: pip install wandb") from error
        self._tags = tags or TensorBoardTags()
        self._interval = interval
        with _only_the_class():
            Path(folder).mkdir(parents=True, exist_ok=True)
            self._run = wandb.init(project=project, entity=entity, name=name, dir=str(folder))

    def write(self, record: Record) -> None:
        """Send the record's scalars, or a start's configuration."""
        with _only_the_class():
            if isinstance(record, StartRecord):
                self._run.config.update(plain(record), allow_val_change=True)
            elif isinstance(record, TrainRecord) and record.iteration % self._interval == 0:
                self._run.log(train_scalars(record, self._tags), step=record.iteration)
            elif isinstance(record, ValidRecord):
                self._run.log(valid_scalars(record, self._tags), step=record.iteration)

    def close(self) -> None:
        """Finish the wandb run."""
        with _only_the_class():
            self._run.finish()
