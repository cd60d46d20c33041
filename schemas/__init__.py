"""Everything that crosses the network or is stored: names, messages, and the pure rules over them.

Imports the standard library and msgspec alone: no I/O, no clock, no logging.
"""
