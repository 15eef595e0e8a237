"""`report.html`: one offline page about a run, made of the files of its folder."""
