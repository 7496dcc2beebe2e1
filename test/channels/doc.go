// Package channels tests channels through the program: real processes, a real PostgreSQL, and providers of the
// repository, which real clients of these providers prove.
package channels
