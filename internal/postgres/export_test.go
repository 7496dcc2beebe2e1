package postgres

import "github.com/jackc/pgx/v5"

// TextsMost is the maximum number of texts per connection.
const TextsMost = textsMost

// Texts is the number of a connection's texts.
func Texts(conn *pgx.Conn) int { return len(textsOf(conn)) }
