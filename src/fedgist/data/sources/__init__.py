"""Readers of data sets, one file per source or format; :mod:`.registry` names them."""
