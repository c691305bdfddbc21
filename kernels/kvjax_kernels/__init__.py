"""Array operations of the hot paths; plain arrays in and out, no kvjax types.

One folder per operation, imported from there; `codes` is the byte layout they share.
`kernels/README.md` lists operations, implementations and layouts.
"""
