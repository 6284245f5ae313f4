"""Hand-made orders, one file each, with a picture and its formula at the top.

They depend on the size of the pipeline alone, and are written as `phases`. Begin with
`one_f_one_b` and `zb_h1`.
"""
