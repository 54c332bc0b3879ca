"""Trials on made-up records, before anything is charged: how are records kept apart, and are they?"""
