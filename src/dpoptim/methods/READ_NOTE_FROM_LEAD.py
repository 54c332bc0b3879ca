raise SystemExit("read NOTE_FROM_LEAD.md at the root of this worktree, then delete this file")
