"""The options of `raymoe generate`, with their help."""

from typing import Annotated

import typer

from raymoe.cli.sources import FORMS
from raymoe.config import DTYPES, ON_TOO_LONG

TABLE = "Table"
SAMPLING = "Sampling"
RUN = "Run"

Model = Annotated[str, typer.Option(help="Model directory, or a name on the hub.")]
Input = Annotated[
    str,
    typer.Option(
        "--input",
        help="Parquet or JSONL: a file, a directory or a glob; also s3://, gs:// and others.",
    ),
]
Output = Annotated[
    str,
    typer.Option(
        help="Directory for parquet parts, or a file that ends in .jsonl; also s3://, gs:// ..."
    ),
]
PromptColumn = Annotated[str, typer.Option(help="Text, or token ids.", rich_help_panel=TABLE)]
MessagesColumn = Annotated[str, typer.Option(help="Chat messages.", rich_help_panel=TABLE)]
IdColumn = Annotated[
    str | None, typer.Option(help="Unique ids; --resume needs them.", rich_help_panel=TABLE)
]
ToolsColumn = Annotated[
    str | None, typer.Option(help="Tools that messages may call.", rich_help_panel=TABLE)
]
Form = Annotated[
    str,
    typer.Option(
        "--format",
        help=f"Of JSON lines: {', '.join(FORMS)}. Requests of an OpenAI batch bring their own "
        "parameters and are answered as responses.",
        rich_help_panel=TABLE,
    ),
]
SamplesAsRows = Annotated[
    bool,
    typer.Option(
        "--samples-as-rows",
        help="With n in --sampling-params, each sample is a row of its own: same id, its number in "
        "sample_index, of num_samples.",
        rich_help_panel=TABLE,
    ),
]
MaxTokens = Annotated[
    int, typer.Option(help="Most tokens to generate for a row.", rich_help_panel=SAMPLING)
]
Temperature = Annotated[float, typer.Option(help="0 is greedy.", rich_help_panel=SAMPLING)]
TopP = Annotated[float, typer.Option(help="Keep this much probability.", rich_help_panel=SAMPLING)]
TopK = Annotated[
    int, typer.Option(help="Keep this many tokens; 0 keeps all.", rich_help_panel=SAMPLING)
]
Seed = Annotated[int, typer.Option(help="Of rows that have none.", rich_help_panel=SAMPLING)]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Go on after EOS.", rich_help_panel=SAMPLING)
]
MoreParams = Annotated[str, typer.Option(help="More, as a JSON object.", rich_help_panel=SAMPLING)]
Dtype = Annotated[str, typer.Option(help=f"One of {', '.join(DTYPES)}.", rich_help_panel=RUN)]
NumActors = Annotated[
    int, typer.Option(min=1, help="Engines; each loads the model.", rich_help_panel=RUN)
]
BatchSize = Annotated[
    int, typer.Option(min=1, help="Rows of one call of the operator.", rich_help_panel=RUN)
]
NumThreads = Annotated[
    int | None, typer.Option(min=1, help="Cores of an engine.", rich_help_panel=RUN)
]
OnTooLong = Annotated[
    str, typer.Option(help=f"One of {', '.join(ON_TOO_LONG)}.", rich_help_panel=RUN)
]
PreserveOrder = Annotated[
    bool, typer.Option("--preserve-order", help="Rows in input order.", rich_help_panel=RUN)
]
Arrange = Annotated[
    bool,
    typer.Option(
        "--arrange",
        help="Sort rows so that those whose prompts begin alike share their computation; no row "
        "comes out before all were read, and their order is lost.",
        rich_help_panel=RUN,
    ),
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on where a run ended.", rich_help_panel=RUN)
]
Journal = Annotated[
    str | None,
    typer.Option(
        help="Keep finished rows in this directory, for --resume and for actors that are killed; "
        "a cluster's nodes must share it. By default beside a local output.",
        show_default=False,
        rich_help_panel=RUN,
    ),
]
NoJournal = Annotated[
    bool, typer.Option("--no-journal", help="Keep no finished rows.", rich_help_panel=RUN)
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace the output.", rich_help_panel=RUN)
]
Price = Annotated[
    float | None,
    typer.Option(min=0.0, help="Of a node, to show what tokens cost.", rich_help_panel=RUN),
]
Report = Annotated[
    bool,
    typer.Option(
        "--report/--no-report",
        help="Write a page with pictures of the run beside the output.",
        rich_help_panel=RUN,
    ),
]
Verbose = Annotated[
    bool, typer.Option("--verbose", help="Show the logs of Ray.", rich_help_panel=RUN)
]
