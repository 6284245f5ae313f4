"""Files: schedules, costs, and costs of layers, in JSON that other tools read.

schedule_file   rows of jobs, one a stage
costs_file      times and memories of chunks, or of layers
json_text       reading JSON, and saying what is wrong with it
"""
