package threads

import (
	"context"
	"encoding/base64"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/models"
)

// Image is an image of a message: an https URL, which the runtime never fetches, or the data.
type Image struct {
	URL       string
	MediaType string // of Data: image/png, image/jpeg, image/gif or image/webp
	Data      []byte
	Detail    string // low, high, auto or ""
}

// Limits of the images of a message. The table enforces the size, too.
const (
	MaxImages    = 8
	MaxImageSize = 5 << 20
	MaxImageURL  = 2048
)

// Part converts the image to a content part.
func (i Image) Part() models.Part {
	url := i.URL
	if url == "" {
		url = "data:" + i.MediaType + ";base64," + base64.StdEncoding.EncodeToString(i.Data)
	}
	return models.Part{Image: &models.Image{URL: url, Detail: i.Detail}}
}

// saveImages inserts the images of new messages; posted and drafts have the same order.
func saveImages(ctx context.Context, db postgres.DB, posted []Message, drafts []NewMessage) error {
	b := &pgx.Batch{}
	for n, d := range drafts {
		for i, image := range d.Images {
			b.Queue(`
				insert into agent_message_images (message_id, place, url, media_type, data, detail)
				values (@message::uuid, @place, nullif(@url, ''), nullif(@media_type, ''), @data::bytea, @detail)`,
				postgres.Strict{
					"message": posted[n].ID, "place": i + 1, "url": image.URL, "media_type": image.MediaType,
					"data": image.Data, "detail": image.Detail,
				})
		}
	}
	if b.Len() == 0 {
		return nil
	}
	if err := db.SendBatch(ctx, b).Close(); err != nil {
		return fmt.Errorf("save images: %w", err)
	}
	return nil
}

// ImageBytes returns the size of the stored images of a thread, in bytes.
func ImageBytes(ctx context.Context, db postgres.DB, thread string) (size int64, err error) {
	err = db.QueryRow(ctx, `
		select coalesce(sum(octet_length(i.data)), 0)
		  from agent_messages m join agent_message_images i on i.message_id = m.id
		 where m.thread_id = @thread`, postgres.Strict{"thread": thread}).Scan(&size)
	if err != nil {
		return 0, fmt.Errorf("measure images: %w", err)
	}
	return size, nil
}

// Images reads the images of messages, by the message's id. Without withData it leaves Data nil. Messages without any
// image cost no query.
func Images(ctx context.Context, db postgres.DB, messages []Message, withData bool) (map[string][]Image, error) {
	var ids []string
	for _, m := range messages {
		if m.Images > 0 {
			ids = append(ids, m.ID)
		}
	}
	if len(ids) == 0 {
		return nil, nil
	}
	rows, err := db.Query(ctx, `
		select message_id::text, coalesce(url, ''), coalesce(media_type, ''), case when @with_data then data end, detail
		  from agent_message_images where message_id = any (@ids::uuid[]) order by message_id, place`,
		postgres.Strict{"ids": ids, "with_data": withData})
	if err != nil {
		return nil, fmt.Errorf("read images: %w", err)
	}
	byMessage := map[string][]Image{}
	var id string
	var image Image
	_, err = pgx.ForEachRow(rows, []any{&id, &image.URL, &image.MediaType, &image.Data, &image.Detail}, func() error {
		byMessage[id] = append(byMessage[id], image)
		image.Data = nil
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read images: %w", err)
	}
	return byMessage, nil
}
