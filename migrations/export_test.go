package migrations

import "io/fs"

// Files exports the embedded SQL files for tests.
func Files() fs.FS { return files }
