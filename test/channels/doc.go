// Package channels tests channels through the program: with real processes, a real PostgreSQL, and fakes of the
// providers, which real clients of these providers prove.
package channels
