"""The command that compiles fedgist's kernels."""

from __future__ import annotations

import typer

from fedgist.cli.shared_options import START, app


@app.command("compile", rich_help_panel=START)
def compile_() -> None:
    """Compile faster convolutions for this machine; once, in a few seconds.

    They are used from then on, where they are faster than torch's. A C compiler is
    needed: cc, gcc, clang or $CC. pip install 'fedgist[compiler]' brings one.

    Runs that have begun keep their kernels.

    Examples
    --------
    fedgist compile
    """
    from fedgist.core.compiled import compiled_convolution, kernel_library

    path = kernel_library.build()
    compiled_convolution.check()
    typer.echo(f"{path}: built; new runs use it")
