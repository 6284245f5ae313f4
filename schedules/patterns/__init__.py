"""Hand-made orders, with a picture and the formula of each at the top of its file.

They depend on the size of the pipeline alone, and are written as `phases`. Begin with
`one_chunk`; `interleaved` and `waves` have several chunks a stage.
"""
