"""``python -m fedgist.cli``."""

from fedgist.cli.main import main

main()
