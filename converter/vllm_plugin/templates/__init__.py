"""The files of templates/ as modules of this package.

They stand beside ``converter`` in a checkout, and inside it in a wheel. vLLM sends config objects to other
processes, so their classes need a name that Python can import there.
"""

from converter.families.templates import templates_folder

__path__ = [str(templates_folder())]
