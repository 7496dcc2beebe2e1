// Package sqlcheck tests the SQL in the Go source. PostgreSQL parses each statement against the migrated schema. A
// misspelt column, a renamed table or a parameter whose type cannot be inferred fails the test at its file and line,
// also in code that no other test runs. A second test rejects searches that no index serves. Tests, bench/ and utility
// statements are skipped.
//
// A statement is found as a string constant: an argument of Exec, Query, QueryRow, Queue, Row, Rows or Names, or any
// constant that begins like SQL. Constants of the package and embedded files are resolved. The file of a statement that
// is composed at run time is listed in the test, with the reason.
package sqlcheck
