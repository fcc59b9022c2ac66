"""``polarstep tokenize`` and ``polarstep download``: data for the experiments."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as RichProgress

from polarstep_lab.cli.errors import clear_errors, need
from polarstep_lab.data.cifar10 import download_cifar10
from polarstep_lab.data.corpus import CharacterVocabulary
from polarstep_lab.data.download import Progress
from polarstep_lab.data.fineweb import SHARDS, download_fineweb, fineweb_names
from polarstep_lab.data.tokenizer import (
    Characters,
    Gpt2,
    Tokenizer,
    VocabularyError,
    read_documents,
    shards_with_prefix,
    tokenize_files,
)
from polarstep_lab.settings_by_name import ConfigError
from polarstep_lab.storage import refuse_unwritable

__all__ = ["download", "tokenize"]


def tokenize(
    files: Annotated[list[Path], typer.Argument(help="UTF-8 text files; each is a document.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the shards.")],
    vocab: Annotated[
        Path | None,
        typer.Option(
            "--vocab",
            help="GPT-2 vocabulary: r50k_base.tiktoken, or a folder with it or with "
            "encoder.json and vocab.bpe.",
        ),
    ] = None,
    characters: Annotated[
        bool, typer.Option("--characters", help="One token per character; no vocabulary needed.")
    ] = False,
    prefix: Annotated[
        str, typer.Option("--prefix", help="Shards are PREFIX_train_000001.bin, …")
    ] = "text",
    validation: Annotated[
        float, typer.Option("--validation", help="Fraction, from the end, for a validation shard.")
    ] = 0.1,
    separator: Annotated[
        str | None, typer.Option("--separator", help="Text between the documents of a file.")
    ] = None,
    shard_tokens: Annotated[
        int, typer.Option("--shard-tokens", min=1, help="Tokens per training shard.")
    ] = 100_000_000,
    force: Annotated[
        bool, typer.Option("--force", help="Replace shards of the same prefix.")
    ] = False,
) -> None:
    """Turn text files into token shards (nanoGPT's .bin format)."""
    with clear_errors("Run the same command again to start over."):
        _check_tokens(vocab, characters)
        if not 0 <= validation < 1:
            raise ConfigError(
                f"--validation {validation:g}: expected a fraction in [0, 1), as 0.1 for the last tenth"
            )
        _check_files(files)
        there = _shards_to_replace(out, prefix, force)
        with _files_progress() as bar:
            task = bar.add_task("files", total=len(files))
            tokenizer = _tokenizer(files, vocab, separator)
            written = tokenize_files(
                files,
                out,
                tokenizer,
                prefix=prefix,
                separator=separator,
                shard_tokens=shard_tokens,
                validation=validation,
                progress=lambda _: bar.advance(task),
            )
        kept = {summary.path for summary in written}
        for old in there:
            if old not in kept:
                old.unlink()  # left over from a longer text; training would read it too
    held_out = f"--set data.val='{out}/{prefix}_val_*.bin' " if validation else ""
    for summary in written:
        typer.echo(f"{summary.path}: {summary.tokens:,} tokens")
    typer.echo(
        f"train on them with: --set data.train='{out}/{prefix}_train_*.bin' {held_out}"
        f"--set model.vocab_size={tokenizer.vocab_size}"
    )


def _check_tokens(vocab: Path | None, characters: bool) -> None:
    """Raise unless exactly one kind of tokens is asked for."""
    if characters == (vocab is not None):
        both = "--vocab and --characters exclude each other; " if characters else ""
        raise VocabularyError(
            f"{both}say which tokens: --vocab FILE for GPT-2's (r50k_base.tiktoken), or --characters"
        )
    if vocab is not None:
        need("--vocab", "tiktoken")


def _check_files(files: list[Path]) -> None:
    """Raise for the first of ``files`` that cannot be read as a text."""
    missing = [str(file) for file in files if not file.exists()]
    if missing:
        raise ConfigError(f"no such file: {', '.join(missing)}")
    folders = [str(file) for file in files if not file.is_file()]
    if folders:
        raise ConfigError(f"{folders[0]} is no file: expected text files, as {folders[0]}/*.txt")


def _shards_to_replace(out: Path, prefix: str, force: bool) -> list[Path]:
    """The shards in ``out`` that are in the way; raises where they may not be replaced."""
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is a file: expected a folder for the shards, as --out data")
    there = shards_with_prefix(out, prefix)
    if there and not force:
        raise ConfigError(
            f"{out} already has {there[0].name}: nothing was overwritten; give another --out or "
            "--prefix, or --force to replace the shards"
        )
    return there


def _files_progress() -> RichProgress:
    return RichProgress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )


def _tokenizer(files: list[Path], vocab: Path | None, separator: str | None) -> Tokenizer:
    if vocab is not None:
        return Gpt2(vocab)
    letters = {c for file in files for text in read_documents(file, separator) for c in set(text)}
    return Characters(CharacterVocabulary.of("".join(letters)))


def download(
    name: Annotated[str, typer.Argument(help="What to download: cifar10, or fineweb.")],
    to: Annotated[Path, typer.Option("--to", help="Folder to put it in.")] = Path("data"),
    shards: Annotated[
        int,
        typer.Option(
            "--shards", help="FineWeb: training shards, of 200 MB each; the paper needs 5."
        ),
    ] = SHARDS,
) -> None:
    """Download CIFAR-10, or token shards of FineWeb, and check their sums."""
    with clear_errors("Run the same command again to go on."):
        if name == "fineweb":
            folder = to / "fineweb10B"
            names = fineweb_names(shards)
            refuse_unwritable(folder / names[0], "--to")
            with _bytes_progress() as show:
                download_fineweb(folder, shards, show)
            where = (
                f"{len(names)} shards of FineWeb are in {folder}, where the recipe nanogpt looks"
            )
        elif name == "cifar10":
            refuse_unwritable(to / "cifar-10-binary.tar.gz", "--to")
            with _bytes_progress() as show:
                where = f"CIFAR-10 is in {download_cifar10(to, show)}"
        else:
            raise ConfigError(f"{name!r}: expected cifar10 or fineweb, which can be downloaded")
    typer.echo(where)


@contextmanager
def _bytes_progress() -> Iterator[Progress]:
    """A display with a bar for each file, and the function that moves its bar."""
    bars: dict[str, TaskID] = {}
    with RichProgress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    ) as display:

        def show(name: str, there: int, size: int) -> None:
            if name not in bars:
                bars[name] = display.add_task(name, total=size)
            display.update(bars[name], completed=there)

        yield show
