"""Commands that write tables, pictures, pages and traces of schedules.

comparison   all modes for one costs file: plans, figures, entries of a page
compare      zbpp compare
drawings     zbpp show -o
meshes       zbpp mesh
"""
