"""`extract export`: an output as the files of other tools."""

from pathlib import Path
from typing import Any, get_args

import click

from extract.cli.options import PLACE, json_option, progress_option, row_options
from extract.exporting.request import Kind
from extract.progress import Progress
from extract.report import emit, exported_text
from extract.spec import ValueType
from extract.storage import Place


@click.command("export")
@click.argument("out", metavar="OUT", type=PLACE)
@click.option("--to", "kind", required=True, type=click.Choice(get_args(Kind)), help="What to write; see above.")
@click.option("-o", "--output", metavar="DIR", required=True, type=click.Path(path_type=Path), help="New directory.")
@row_options
@click.option("--cast", type=click.Choice(get_args(ValueType)), help="Type of the states.  [default: as in OUT]")
@click.option("--unfinished", is_flag=True, help="Export what is committed of an output that is not complete.")
@click.option(
    "--layers",
    metavar="LAYERS",
    help="speculators, specforge: which stored layers, in order, such as 2,18,33, or final, the state after the final "
    "norm alone; saelens: one of them.  [default: none; final for saelens]",
)
@click.option(
    "--loss-mask",
    metavar="roles|all|NAME",
    help="speculators, specforge: learn from the assistant's tokens, from all, or as a carried column says.  "
    "[default: roles, where the input was messages]",
)
@click.option(
    "--engine",
    metavar="DIR",
    help="speculators, specforge: where the job's engine lies now, for --loss-mask roles.  [default: where it lay]",
)
@click.option(
    "--context", metavar="TOKENS", type=click.IntRange(min=1), help="saelens: states of a row.  [default: 128]"
)
@click.option("--hook", metavar="NAME", help="saelens: name of the column of states.  [default: final_norm]")
@click.option(
    "--rows-per-file",
    metavar="ROWS",
    type=click.IntRange(min=1),
    help="safetensors: most rows of a file.  [default: 4,096]",
)
@progress_option
@json_option
def export_command(
    out: Place,
    kind: Kind,
    output: Path,
    rows: str | None,
    outcomes: tuple[str, ...],
    cast: Any,
    unfinished: bool,
    layers: str | None,
    loss_mask: str | None,
    engine: str | None,
    context: int | None,
    hook: str | None,
    rows_per_file: int | None,
    progress: Progress,
    as_json: bool,
) -> None:
    """Write an output as files that other tools read; needs no model.

    \b
    parquet      one file a shard, every row and column; states are
                 byte-stream-split, bfloat16 is uint16
    npy          states.npy to map, offsets.npy, a table of the rows
    safetensors  files of some thousand rows; no ids, no carried columns
    hf           a Hugging Face dataset directory, every row and column;
                 bfloat16 is uint16
    lance        a Lance dataset for vector search; float16 and float32
    speculators  training data of vLLM speculators, one sample a row
    specforge    offline features of SGLang's SpecForge, one sample a row
    saelens      activations for SAELens, states cut every --context tokens

    All but parquet, hf and lance leave out rows without states. int8 needs --cast. The directory gets its name when
    everything is in it and some rows were read back with the target's own loader; it says in export.json and README.md
    what it holds, what it left out and how it is read. After an interruption the same command goes on.

    \b
    Example:
        extract export out --to parquet -o out-parquet
        extract export out --to npy --cast float32 --outcome ok -o out-npy
    """
    from extract.exporting.export import export

    found = export(
        out,
        output,
        kind=kind,
        progress=progress,
        rows=rows,
        outcomes=outcomes,
        cast=cast,
        unfinished=unfinished,
        layers=tuple(name.strip() for name in layers.split(",")) if layers else (),
        loss_mask=loss_mask,
        engine=engine,
        context=context,
        hook=hook,
        rows_per_file=rows_per_file,
    )
    emit(found, exported_text, as_json)
