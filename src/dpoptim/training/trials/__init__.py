"""Trials on made-up records, before anything is charged: are records kept apart, and how?"""
