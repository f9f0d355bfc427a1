"""The command that compiles fedgist's kernels."""

from __future__ import annotations

import typer

from fedgist.cli.shared_options import START, app


@app.command("compile", rich_help_panel=START)
def compile_() -> None:
    """Compile faster convolutions for this machine; once, in a few seconds.

    The first run that can use them does it by itself. This command is for images
    and for machines without a network, or after a compiler has failed. It needs a
    C compiler: cc, gcc, clang or $CC. The extra "compiler" installs one.

    Examples
    --------
    fedgist compile
    """
    from fedgist.engines.plans.kernel_building import build_kernels

    typer.echo(f"{build_kernels()}: built; new runs use it")
