"""Kernel templates in TVM TIR. Every kernel is rows of q, a storage and a mask; see DESIGN.md."""
