"""The command line: `main` holds the application, and every command has a file of its own.

A command file imports only light modules at its top (typer, pathlib) and the heavy ones inside the
command, so that `looplm --help` answers at once.
"""
