// Package sqlcheck has one test: PostgreSQL parses every SQL statement of this repository's Go source
// against the migrated schema. A misspelt column, a table that was renamed or a parameter whose type
// cannot be inferred fails the test at its file and line, also in code that no other test runs.
//
// A statement is found as a string constant: an argument of Exec, Query, QueryRow or Queue, or any
// constant that begins like SQL. Constants of the package and embedded files are resolved; a statement
// that is put together while the program runs has to be listed in the test, with the reason.
package sqlcheck
