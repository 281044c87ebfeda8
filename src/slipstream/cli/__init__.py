"""The command line: one file a group of commands, imported when a command of it is called.

Touch app.py to add a command.
"""
