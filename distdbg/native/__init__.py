"""The native recorder: backward nodes recorded in C++ (`distdbg build-native`, `distdbg run --recorder`).

It is compiled once per torch, Python and machine into a cache outside of the package, and never in training.
"""
