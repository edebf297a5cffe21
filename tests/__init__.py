"""The tests of ntk-convert; a package so that they can share ``tiny`` and ``reference``."""
