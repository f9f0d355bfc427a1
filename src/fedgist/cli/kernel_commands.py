"""The command that compiles fedgist's kernels."""

from __future__ import annotations

import typer

from fedgist.cli.shared_options import START, app


@app.command("compile", rich_help_panel=START)
def compile_() -> None:
    """Compile faster convolutions for this machine; once, in a few seconds.

    New runs use them wherever they are faster than torch's. Runs that have begun
    keep their kernels. CS-FL's transform is compiled, too. It needs a C compiler:
    cc, gcc, clang or $CC. The extra "compiler" installs one.

    Examples
    --------
    fedgist compile
    """
    from fedgist.core import hadamard
    from fedgist.core.nets.compiled import compiled_convolution, kernel_library

    path = kernel_library.build()
    compiled_convolution.check()
    hadamard.check()
    typer.echo(f"{path}: built; new runs use it")
