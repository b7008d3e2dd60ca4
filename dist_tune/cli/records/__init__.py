"""Records for the command line: those that words stand for, and the commands of ``dist-tune cache`` on them.

Each module is imported by the command that needs it. Reads and deletes records, and carries them between caches; tunes nothing.
"""
