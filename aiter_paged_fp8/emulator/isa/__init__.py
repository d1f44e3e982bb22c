"""Instruction families: one module each, every instruction a small function with its manual section.

See ``operation.instruction`` for how a decoder is registered, and ``operands`` for how operands are read and written.
"""
