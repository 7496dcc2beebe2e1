package migrations

import "io/fs"

// Files are the files of this binary, for tests that add to them.
func Files() fs.FS { return files }
