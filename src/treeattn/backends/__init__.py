"""Where kernels run. One module per runtime; each imports its optional packages itself."""
