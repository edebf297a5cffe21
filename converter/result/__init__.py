"""A converted repository: its files, its card and how it is put in place."""
