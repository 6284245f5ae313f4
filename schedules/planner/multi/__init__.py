"""Any placement: `plan` tells how; `problem` holds the numbers.

Orders come from `list_scheduler` under the `rules`, from `rounds` and from patterns;
`place_weights` and `timing` complete them, `seeds` keeps the best, `critical_path` and
`search` better it.
"""
